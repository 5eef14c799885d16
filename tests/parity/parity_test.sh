#!/usr/bin/env bash
# Runs program $1 beside Python's FSDP2 (script $2) of the wheel that the program's LibTorch comes from. $3: what else that
# Python must have.
set -euo pipefail

program=$1 script=$2
library=$(realpath "$(ldd "$program" | awk '/libtorch_cpu\.so/ { print $3 }')")
python=${library%/lib/python3*}/bin/python3
if ! "$python" -c "import torch.distributed.fsdp${3:+,$3}" 2> /dev/null; then
  echo "parity_test: NOT TESTED: no Python with torch${3:+ and $3} for $library" >&2
  # Counted as skipped by tools/test.
  echo '<testsuites><testsuite><testcase name="parity_test"><skipped/></testcase></testsuite></testsuites>' \
    > "${XML_OUTPUT_FILE:-/dev/null}"
  exit 0
fi
exec "$python" "$script" "$program"
