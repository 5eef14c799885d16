#!/usr/bin/env bash
# Runs the training tests of test program $1 over Gloo, as between hosts: else its ranks
# share memory. Not random programs, each of which draws its transport.
exec env FSDP_PEER_MEMORY=off "$1" \
  --gtest_filter='*Training.*:*ModuleZoo.*:*ExplicitUnshard*:*ReshardAfter*:*HybridSharding*:*PolicyTraffic*:*OwnNumbers*:*/GatherCodecs.*'
