#!/usr/bin/env bash
# Places of the table of program $1 at random for 40 seconds; .ci/early_ends runs all of it.
exec "$1" --seconds=40 --seed="${FSDP_FIRST_SEED:-1}"
