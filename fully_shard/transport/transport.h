// How a group's bytes travel between the ranks of one mesh dimension, over c10d process
// groups: any backend, any number of hosts. One object per rank and process group. Memory
// that others may read comes from here, and what can be done is asked, never guessed from
// the device.
//
//   auto shards = transport.shard_memory(bytes, device);   // this rank's row
//   auto gather = transport.gather(shards, {.unit = 3, .unit_name = "blocks.0"});
//   ...
//   const GatheredRows rows = gather.wait();                // throws unless all ranks agree
//   read(rows.row(r), ...);                                 // good while `rows` lives
//
// gather() and reduce() are collective over the dimension; they do not block. After a
// collective that failed the ranks no longer agree on what was sent: every later call
// throws and says which was the first. Messages give ranks of the whole job.
//
// Gathers and reductions have a group each, so that they do not queue behind one another,
// and are announced there (device_mesh/collectives/issue_log.h), each kind in one order:
// when a reduction leaves between two gathers may differ from rank to rank, since
// gradients arrive differently. On CPU a reduction is an exchange of rows, added in the
// order of the ranks: the same bits on every run. On other devices it is the backend's
// reduce-scatter, of 16-bit types and codes its all-to-all and such a sum, and nothing is
// announced: ranks tell each other once per backward (host_exchange.h).
//
// Where ranks share memory, shards may lie where others read them by themselves
// (share_shards()), and then nothing is gathered.
#pragma once

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/device_mesh.h"
#include "fully_shard/communicate.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

struct CodedAllReduce;
class HostExchange;
class SharedShards;
struct Patience;
struct ShardsToShare;

// What a unit without a path is called.
inline constexpr char kRootName[] = "(root)";

// What is issued: goes into the stamp, the log of issues and every message.
struct Issue {
  uint32_t unit = 0;           // number of the unit on this process group, the same on all ranks
  std::string unit_name = {};  // kRootName for a root
  NoticeWords words = {};      // travel with it, to be compared by the caller
  std::string form = {};       // in messages, behind the unit, where it sends other than values
  // Of gather() and reduce(): the bytes at the beginning of each rank's row that count
  // (AllGatherOptions).
  std::vector<int64_t> lengths = {};
  // What sends gather() or reduce() in the transport's place, while it announces and
  // compares as ever; null: the transport. Outlives the call.
  const Communicate* custom = nullptr;
};

// "unit 'blocks.0'"; a root has no path, and there may be several, so with its number:
// "unit '(root)' (number 3)".
std::string in_words(const Issue& issue);

class Transport {
 public:
  // Collective over the ranks of `dim` the first time.
  Transport(const DeviceMesh& mesh, int64_t dim);
  ~Transport();
  Transport(const Transport&) = delete;

  const Collectives& gathers() const { return gathers_; }
  const Collectives& reductions() const { return reductions_; }
  int64_t shard_rank() const { return gathers_.rank(); }   // in the mesh dimension
  int64_t shard_count() const { return gathers_.size(); }  // ranks of the mesh dimension

  // Zeroed, uint8 [bytes], 64-byte aligned; lives as long as tensors refer to it.
  at::Tensor shard_memory(int64_t bytes, c10::Device device) const;
  // Of shards that are copied to be gathered once: as shard_memory(), but what is not
  // written may have any value.
  at::Tensor staging_memory(int64_t bytes, c10::Device device) const;
  // uint8 [shard_count, row_bytes], contiguous per row (the row stride may be larger),
  // not initialised.
  at::Tensor row_memory(int64_t row_bytes, c10::Device device);
  // Shards that the other ranks read by themselves; null where ranks do not share memory.
  // In one order on all ranks; local.
  std::shared_ptr<SharedShards> share_shards(const ShardsToShare& shards);

  // `shards` from shard_memory() or staging_memory(), whole; not written until waited
  // for.
  InFlight<GatheredRows> gather(const at::Tensor& shards, const Issue& issue);
  // `rows` from row_memory(): row r goes to rank r. Overwritten.
  InFlight<SummedRow> reduce(at::Tensor rows, const Summands& summands, const Issue& issue);
  // The sum of `row`, [elements] contiguous, over the ranks, with the same bits on all;
  // `row` is overwritten. What hybrid sharding does over the ranks with the same shards.
  InFlight<SummedRow> all_reduce(at::Tensor row, const Issue& issue);
  // The same with codes in the row's place.
  InFlight<SummedRow> all_reduce(const CodedAllReduce& row, const Issue& issue);

  // Bring up what gathers, and what reductions, communicate through on devices, as the
  // first of them would: all ranks in one order, and not within a step. Block; collective
  // over the dimension.
  void connect_gathers();
  void connect_reductions();

  // All ranks have reached the end of a backward that has reduced something.
  void end_of_backward();

  // False on devices, where reading stamps stalls the host.
  bool checks_stamps() const { return device_.is_cpu(); }
  // Whether words of others travel with what it brings.
  bool brings_words() const { return checks_stamps() && shard_count() > 1; }
  // Whether values in reduced rows may be read on the host.
  bool reads_flags() const { return device_.is_cpu(); }
  // What ranks tell each other instead where they can do neither; null: nothing.
  HostExchange* host_exchange();

 private:
  Collectives gathers_, reductions_;
  c10::Device device_;
  std::unique_ptr<HostExchange> host_exchange_;
  std::vector<std::weak_ptr<SharedShards>> shared_;
  const std::shared_ptr<Patience> patience_, patience_to_begin_;
};

}  // namespace fsdp::internal
