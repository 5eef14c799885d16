// How a group's bytes travel between the ranks of one mesh dimension: the narrow
// interface the runtime speaks to. One object per rank and process group. Memory that
// others may read comes from the transport, stamps live inside it, and what it can do is
// asked, never guessed from the device.
//
//   auto shards = transport.shard_memory(bytes, device);   // this rank's row
//   auto gather = transport.gather(shards, {.unit = 3, .unit_name = "blocks.0"});
//   ...
//   const GatheredRows rows = gather->wait();               // throws unless all ranks agree
//   read(rows.row(r), ...);                                 // good while `rows` lives
//
// gather() and reduce() are collective over the dimension, each of the two in one order
// on all ranks; they do not block. After a collective that failed the ranks no longer
// agree on what was sent: every later call throws and says which was the first. Messages
// give ranks of the whole job. Where ranks share memory, shards may lie where others read
// them by themselves (share_shards()), and then nothing is gathered; nor do reductions
// need an order there (unordered_reductions()).
#pragma once

#include "device_mesh/collectives/gather.h"
#include "device_mesh/collectives/reduction.h"
#include "device_mesh/device_mesh.h"
#include "fully_shard/communicate.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

class HostExchange;
class SharedShards;
struct ShardsToShare;
class UnorderedReductions;

// What a unit without a path is called.
inline constexpr char kRootName[] = "(root)";

// What is issued: goes into the stamp, the log of issues and every message.
struct Issue {
  uint32_t unit = 0;           // number of the unit on this process group, the same on all ranks
  std::string unit_name = {};  // kRootName for a root
  NoticeWords words = {};      // travel with it, to be compared by the caller
  // Of gather() and reduce(): the bytes at the beginning of each rank's row that count
  // (GatherOptions). Outlives the call.
  const std::vector<int64_t>* lengths = nullptr;
  // What sends gather() or reduce() in the transport's place, while it announces and
  // compares as ever; null: the transport. Outlives the call.
  const Communicate* custom = nullptr;
};

// "unit 'blocks.0'"; a root has no path, and there may be several, so with its number:
// "unit '(root)' (number 3)".
std::string in_words(const Issue& issue);

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int64_t shard_rank() const = 0;   // in the mesh dimension
  virtual int64_t shard_count() const = 0;  // ranks of the mesh dimension
  // Zeroed, uint8 [bytes], 64-byte aligned; lives as long as tensors refer to it.
  virtual at::Tensor shard_memory(int64_t bytes, c10::Device device) = 0;
  // uint8 [shard_count, row_bytes], contiguous per row (the row stride may be larger),
  // not initialised.
  virtual at::Tensor row_memory(int64_t row_bytes, c10::Device device) = 0;
  // Shards that the other ranks read by themselves; null where ranks do not share memory.
  // In one order on all ranks; local.
  virtual std::shared_ptr<SharedShards> share_shards(const ShardsToShare& /*shards*/) {
    return nullptr;
  }
  // Of shards that are copied to be gathered once: as shard_memory(), but what is not
  // written may have any value.
  virtual at::Tensor staging_memory(int64_t bytes, c10::Device device) {
    return shard_memory(bytes, device);
  }
  // `shards` from shard_memory() or staging_memory(), whole; not written until waited
  // for.
  virtual std::unique_ptr<Gather> gather(const at::Tensor& shards, const Issue& issue) = 0;
  // `rows` from row_memory(), elements of `dtype`: row r goes to rank r. Overwritten.
  virtual std::unique_ptr<PendingReduction> reduce(at::Tensor rows, at::ScalarType dtype,
                                                   const Issue& issue) = 0;
  // The sum of `row`, [elements] contiguous, over the ranks, with the same bits on all;
  // `row` is overwritten. What hybrid sharding does over the ranks with the same shards.
  virtual std::unique_ptr<PendingReduction> all_reduce(at::Tensor row, const Issue& issue) = 0;
  // Bring up what gathers, and what reductions, communicate through on devices, as the
  // first of them would: all ranks in one order, and not within a step. Block; collective
  // over the dimension.
  virtual void connect_gathers() {}
  virtual void connect_reductions() {}
  // Where reductions need no order, what makes them; null: reduce() does, in one order on
  // all ranks. The same answer on every rank. Local.
  virtual UnorderedReductions* unordered_reductions() { return nullptr; }
  // All ranks have reached the end of a backward that has reduced something.
  virtual void end_of_backward() {}
  // False on devices, where reading stamps stalls the host.
  virtual bool checks_stamps() const = 0;
  virtual bool reads_flags() const = 0;  // values in reduced rows may be read on the host
  // What ranks tell each other instead where they can do neither; null: nothing.
  virtual HostExchange* host_exchange() { return nullptr; }
};

// Chosen per mesh dimension. Collective over the dimension the first time.
std::unique_ptr<Transport> make_transport(const DeviceMesh& mesh, int64_t dim);

}  // namespace fsdp::internal
