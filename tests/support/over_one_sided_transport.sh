#!/usr/bin/env bash
# Runs the training tests of test program $1 over the one-sided test transport. Left out: a
# gather in flight has no staging bytes there, and carries no words for ranks to compare.
exec env FSDP_TEST_TRANSPORT=one_sided "$1" \
  --gtest_filter='*Training.*:*ModuleZoo.*:*UnshardByHand*:*ReshardAfter*:*DeferredInit*-*AsyncIssuesOneGather*:*RanksThatDrewOtherValues*'
