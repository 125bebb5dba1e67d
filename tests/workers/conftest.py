"""Before Ray is imported, which reads these once: the tests' cluster asks for a token, as docs/scaling.md starts one."""

import os

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
