// var, std, var_mean and std_mean.
#pragma once

namespace fsdp::internal {

class OpTable;

void add_variance(OpTable& table);

}  // namespace fsdp::internal
