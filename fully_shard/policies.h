// What a user may ask of one fully_shard call.
#pragma once

#include "dtensor/placement.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace fsdp {

namespace internal {
template <class Number>
concept NumberOfRanks = std::integral<Number> && !std::same_as<Number, bool>;
template <class Number>
inline constexpr bool kTellsWhetherToReshard = !NumberOfRanks<Number>;
}  // namespace internal

// What becomes of the unsharded parameters after forward: freed (true), kept for backward
// (false), or kept as a 1/n piece on n neighbouring ranks (to_world(n)). Takes a bool and
// nothing else: an int would be ambiguous.
class ReshardAfterForward {
 public:
  template <std::same_as<bool> Bool>
  ReshardAfterForward(Bool reshard) : value_(reshard) {}
  // Converts, so that the compiler's error is this one wherever a number is written, also
  // in {.reshard_after_forward = 4}.
  template <internal::NumberOfRanks Number>
  ReshardAfterForward(Number) : value_(true) {
    static_assert(internal::kTellsWhetherToReshard<Number>,
                  "a number of ranks is ReshardAfterForward::to_world(n)");
  }
  [[nodiscard]] static ReshardAfterForward to_world(int64_t n) {
    return ReshardAfterForward(World{n});
  }

  bool reshards() const { return !std::holds_alternative<bool>(value_) || std::get<bool>(value_); }
  std::optional<int64_t> world() const {
    return std::holds_alternative<World>(value_) ? std::optional(std::get<World>(value_).n)
                                                 : std::nullopt;
  }

 private:
  struct World {
    int64_t n;
  };
  explicit ReshardAfterForward(World world) : value_(world) {}
  std::variant<bool, World> value_;
};

// Of Half, BFloat16, Float and Double; unset: as the parameters are. Only floating
// parameters, gradients, buffers, inputs and outputs are cast.
struct MixedPrecisionPolicy {
  // What modules compute with, and what is gathered; shards keep their dtype.
  std::optional<at::ScalarType> param_dtype = {};
  // What gradients are added up in, over backwards and ranks; unset: param_dtype. Over
  // ranks on CPU, 16-bit types are added in Float; on devices the backend, such as NCCL,
  // adds in this dtype.
  std::optional<at::ScalarType> reduce_dtype = {};
  // What buffers become, in place, when fully_shard is applied; unset: they stay. Those
  // of the unit's modules, but not of units below; one that two units share goes to the
  // first. Checkpoints save what they were before.
  std::optional<at::ScalarType> buffer_dtype = {};
  // What fsdp::forward returns.
  std::optional<at::ScalarType> output_dtype = {};
  // With param_dtype: an operator that meets a parameter gets its other floating inputs
  // (of one dimension or more) in that dtype; fsdp::forward casts its own.
  bool cast_forward_inputs = true;
};

// When a backward gathers ahead what is expected next: when a unit is entered, or, for
// one unit less in memory, when that unit's gradients have left for their reduction
// (without gradient synchronisation: not ahead at all). The same units are gathered.
enum class BackwardPrefetch { kPre, kPost };

// Shards, their gradients and so the optimizer's state and step are on the CPU; on the
// mesh's device is what a gather brings, while it is there. Gathers copy this rank's
// shards to the device, and reductions their result back; the host waits for both. On a
// CPU mesh nothing changes. Sharded parameters stay where they are: moving the module
// throws and names the parameter.
struct OffloadPolicy {
  bool offload_to_cpu = false;
  bool pin_memory = true;  // page-locked, as copies to and from a device like it
};

// What the first dimension of a mesh of two is for. kReplicate, hybrid sharding (HSDP):
// its ranks hold the same shards, and sum their gradients. kShardOptimizer (HFSDP, hybrid
// sharding of everything, as Megatron-FSDP's outer_dp_sharding_strategy = "optim"): it
// cuts the shards once more. The registry entries, and with them gradients and the
// optimizer's state, are 1/(all ranks) each; the inner shards that gathers read are put
// together over the first dimension once after a step, in param_dtype, and stay until the
// next one. Values are those of kReplicate. What it costs: docs/placements.md.
enum class Outer { kReplicate, kShardOptimizer };

struct FullyShardOptions {
  std::optional<ReshardAfterForward> reshard_after_forward =
      {};  // unset: true, and false for the root
  // How a parameter is sharded: along a dimension of any size (Shard; negative: counted
  // from the end), in whole blocks of `unit` of its rows, in parts of stated sizes
  // (RaggedShard), or whole on one rank (Owned; Owned{}: on one that evens the bytes of
  // the unit's ranks, then those of all units). On devices rows that travel are as long
  // as that of the rank with the most, so parameters on owners want several in a unit.
  // Called once per managed parameter; nothing: Shard(0). Every rank must answer alike.
  std::function<std::optional<Placement>(const std::string& fqn, const at::Tensor&)>
      shard_placement_fn = {};
  MixedPrecisionPolicy mp_policy = {};
  OffloadPolicy offload_policy = {};
  // Of a mesh of two dimensions. With kShardOptimizer entries lie on the mesh with its
  // dimensions in the other order, placed Shard along both. The first use of a unit after
  // its entries were written, or its gradients reduced, is collective over the whole
  // mesh, as is what ranks write: a write that some ranks of the first dimension leave
  // out makes the others wait. Parameters are cut by a Shard without unit there.
  Outer outer = Outer::kReplicate;
  std::vector<at::Tensor> ignored_params = {};  // by identity: neither sharded nor reduced
};

}  // namespace fsdp
