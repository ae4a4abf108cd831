"""`python -m kvstore.vllm.demo`."""

import sys

from kvstore.errors import KVStoreError
from kvstore.vllm.demo.run import main

try:
    code = main()
except KVStoreError as error:
    print(f"kvstore: {error}", file=sys.stderr)
    code = 2
sys.exit(code)
