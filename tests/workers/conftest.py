"""Before Ray is imported, which reads these once: the cluster of the tests asks for a token, as in docs/scaling.md."""

import os

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
