#!/usr/bin/env bash
# Places of the table of program $1 at random for 20 seconds, at night 5 minutes; .ci/early_ends runs all of it.
exec "$1" --seconds="$((${FSDP_NIGHT:-0} ? 300 : 20))" --seed="${FSDP_FIRST_SEED:-1}"
