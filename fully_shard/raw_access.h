// Access to parameters that operators do not see: raw pointers, and the local tensors of
// registry entries.
//
//   {
//     fsdp::Unsharded weight(linear->weight);      // collective
//     my_kernel(linear->weight.data_ptr<float>());
//     weight.mark_written();                       // if the kernel wrote
//   }
#pragma once

#include "device_mesh/api.h"

#include <ATen/core/Tensor.h>

#include <memory>

namespace fsdp {

// Keeps the unit of one parameter unsharded while it lives, so that pointers into its
// members stay good. Nests.
//
// The constructor is collective over the mesh unless the unit is unsharded; it throws
// ValueError for a tensor that is neither a member nor a registry entry of a unit. The
// destructor is local: it reshards, and this rank's part of what was marked as written,
// or written by operators, goes to the shard. While it lives, writes to the unit's
// registry entries throw. On CUDA the parameters are ready for work on the current
// stream.
class [[nodiscard]] FSDP_API Unsharded {
 public:
  [[nodiscard]] explicit Unsharded(const at::Tensor& parameter);
  ~Unsharded();
  Unsharded(const Unsharded&) = delete;
  Unsharded& operator=(const Unsharded&) = delete;

  // The parameter was written through a pointer. Every rank must say so. Throws
  // ValueError inside of a SummonFullParams with writeback = false, which would drop it.
  void mark_written();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Announces that the shard of `parameter` was written through an alias
// (DTensor(parameter).to_local()), which bypasses operators on the registry entry. Every
// rank must write and announce. Waits for a gather in flight; otherwise local. Throws
// ValueError for a tensor that is neither a member nor a registry entry of a unit.
FSDP_API void mark_shard_written(const at::Tensor& parameter);

}  // namespace fsdp
