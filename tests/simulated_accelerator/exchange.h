// Exchanges: what collectives do to the memory of their ranks, once everybody is there.
// Each checks that the ranks' sizes fit, which NCCL does not.
#pragma once

#include "tests/simulated_accelerator/rendezvous.h"

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fsdp::testing::simulated {

// Every input to every output, by rank.
Exchange gather_rows();

// Of the combined input, row r to rank r; or all of it to everybody. Values are combined
// in the order of ranks, in their own dtype, as NCCL does.
Exchange reduce_rows(at::ScalarType dtype, c10d::ReduceOp::RedOpType operation);
Exchange reduce_whole(at::ScalarType dtype, c10d::ReduceOp::RedOpType operation);

// Part r of every input to rank r, by the splits of the operands.
Exchange exchange_parts();

Exchange copy_from_rank(size_t root);

}  // namespace fsdp::testing::simulated
