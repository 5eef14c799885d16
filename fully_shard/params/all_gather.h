// An all-gather of a group (PyTorch's foreach_all_gather), over the ranks that shard or,
// with HFSDP, of pieces over the outer dimension: the row that this rank sends, and the
// gather from its issue until its rows are let go. Which of the two kinds it is, rows
// that ranks send each other or shards that this rank reads where the others have them
// (SharedRead), matters where it is issued and where it is read again.
//
//   gather.start(row, issue);          // or start_read(read, layout, ranks)
//   auto rows = gather.wait();
//   ...the current stream copies out of gather.rows(rows)...
//   gather.rows_were_read(copied);     // an event of it
//   rows = {};
//   gather.release();
//
// With HFSDP the pieces come first, by a gather of their own (InnerShards).
//
// Local, but for AllGather::start(), which is collective over the row's transport, and
// InnerShards::issue().
#pragma once

#include "device_mesh/collectives/operations.h"
#include "device_mesh/internal/accelerator.h"
#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/params/shard_buffer.h"
#include "fully_shard/transport/codec_failure.h"
#include "fully_shard/transport/packed_copy.h"
#include "fully_shard/transport/packed_layout.h"
#include "fully_shard/transport/shared_shards.h"
#include "fully_shard/transport/streams.h"
#include "fully_shard/transport/transport.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal {

// What a rank sends when a group is gathered, and the ranks that it goes to.
struct PackedRow {
  Transport& transport;
  const PackedLayout& layout;  // of every rank's row; outlives the gather
  at::Tensor bytes;            // memory of the transport
};

// Memory of a row that is sent in the place of the shards: copies of them in another
// dtype or on another device, HFSDP's inner shards, or the part that a forward left. Its
// bytes are counted in `counter` from allocate() until free().
class RowMemory {
 public:
  // `transport` outlives it.
  RowMemory(Transport& transport, PackedLayout layout, int64_t Counters::*counter,
            GroupAccounts accounts);
  ~RowMemory() { free(); }
  RowMemory(const RowMemory&) = delete;

  Transport& transport() const { return transport_; }
  const PackedLayout& layout() const { return layout_; }
  bool exists() const { return bytes_.defined(); }
  const at::Tensor& bytes() const { return bytes_; }

  // `bytes`, layout().row_bytes() of the transport's memory that the current stream
  // allocated, takes the place of what there was.
  void allocate(at::Tensor bytes);
  // The current stream fills it anew, after all that used it.
  void refill();
  // What the current stream was given so far has filled it.
  void filled() { streams_.ready(DeviceStream::current(bytes_.device())); }
  // When that is.
  const DeviceEvent& when_filled() const { return streams_.when_ready(); }
  // To be sent by the calling thread's stream. REQUIRES: filled.
  PackedRow row();
  void free();

 private:
  Transport& transport_;
  PackedLayout layout_;
  int64_t Counters::*counter_;
  GroupAccounts accounts_;
  at::Tensor bytes_;
  StreamMemory streams_{StreamWait::kUseAfterFill, StreamWait::kFreeAfterUse};
};

// Whether shards are copied to be sent: the members have another dtype
// (MixedPrecisionPolicy::param_dtype), codes are gathered in their place
// (FullyShardOptions::gather_codec_fn), or members are on a device and the shards on the
// CPU (OffloadPolicy).
bool are_staged(const std::vector<FSDPParam>& params, const ShardBuffer& shards);
// Null where they are not.
std::unique_ptr<RowMemory> make_staging(const std::vector<FSDPParam>& params,
                                        const ShardBuffer& shards, Transport& transport,
                                        GroupAccounts accounts);
// The shards as they are now, as codes or in the members' dtypes and on their device,
// copied there on the current stream; good until `staging` is freed or used again. What a
// codec throws is for `failure`, with the parameter's name; `staging` is freed where that
// throws it.
PackedRow stage(RowMemory& staging, const ShardBuffer& shards, const std::vector<FSDPParam>& params,
                CodecFailure& failure);

// The stream that issued a gather owns the memory of the rows that arrive, so it waits
// for whoever reads them elsewhere. What the gather stages is counted
// (Counters::staging_bytes) as long.
class AllGather {
 public:
  explicit AllGather(GroupAccounts accounts) : accounts_(std::move(accounts)) {}
  ~AllGather() { drop(); }
  AllGather(const AllGather&) = delete;

  // Issues it on the current stream; does not block. REQUIRES: there is none.
  void start(const PackedRow& own, const Issue& issue);
  // The same of shards that this rank reads by itself, which nobody else takes part in.
  void start_read(std::unique_ptr<SharedRead> read, const PackedLayout& layout, int64_t ranks);
  bool exists() const { return gather_.has_value() || read_ != nullptr; }
  // The read, where it is one; else null.
  SharedRead* read() const { return read_.get(); }

  // The current stream waits for the rows. Throws what failed, and lets the gather go. A
  // read may be waited for again.
  GatheredRows wait();
  // Those rows, and how they lie; refers to `rows`.
  RowsOfRanks rows(const GatheredRows& rows) const {
    return {rows, *layout_, ranks_, read_ != nullptr ? Arrangement::kCommon : Arrangement::kRow};
  }
  // The rows have been read at `read`, and the issuer waits for it.
  void rows_were_read(const DeviceEvent& read);
  void release();

  // Nobody reads the rows. The current stream waits for the gather, since what is called
  // next may write what it sends. No failure shows. Nothing where there is none.
  void drop() noexcept;
  // The same on all streams, and throws what failed when it is dropped.
  void await_and_drop();

 private:
  void wait_and_tell_issuer();

  GroupAccounts accounts_;
  std::optional<InFlight<GatheredRows>> gather_;
  std::unique_ptr<SharedRead> read_;  // in its place
  const PackedLayout* layout_ = nullptr;
  int64_t ranks_ = 0;
  std::optional<DeviceStream> issuer_;
};

// The codes of some rows of a parameter, of which `values` are: [n], uint8 [bytes].
// Throws what the codec throws.
at::Tensor encoded(const FSDPParam& param, const at::Tensor& values);
// Codes of whole parameters become their values: what `codes`, as `layout` has it in
// memory of all ranks, says of each of `params`, and, where it has no codec, its values,
// go to `values`. On the current stream. Throws what a codec throws.
void decode(const RoomOfParameters& codes, const RoomOfParameters& values,
            const std::vector<FSDPParam>& params);

// Whether all ranks have been found to cut the parameters alike: then rows are sent as
// long as they are, where the transport can.
enum class Layouts : uint8_t { kNotCompared, kAgreed };

// HFSDP (Outer::kShardOptimizer): the inner shards of a group, which gathers over the
// inner dimension read, as codes or in the members' dtypes. Registry entries are pieces
// of them, one on each rank of the outer dimension. A gather over that dimension puts the
// pieces together, and what it brought stays until the pieces change: that is once per
// step.
//
//   inner.issue(words, layouts);       // where they are stale; may come ahead of the use
//   const auto heard = inner.wait();   // the words of the outer ranks
//   inner.agreed();                    // they agree: not stale any more
//   ...gather inner.row() over the inner dimension...
//   inner.pieces_change();             // an operator or a reduction: stale
//
// Which ranks find them stale must not differ along the outer dimension: every rank that
// publishes gradients does, whether its optimizer will write or not.
class InnerShards {
 public:
  // All outlive it; `info` has pieces.
  InnerShards(const GroupInfo& info, const std::vector<FSDPParam>& params,
              const ShardBuffer& shards);
  ~InnerShards() { pieces_change(); }
  InnerShards(const InnerShards&) = delete;

  const PackedLayout& layout() const { return row_.layout(); }  // of every inner rank's row
  // Of this rank's pieces on the places of the grid, as inner shards are.
  const PackedLayout& layout_of_pieces() const;

  bool are_stale() const { return is_stale_; }
  // Stale, and no gather that makes them is under way.
  bool are_to_be_issued() const;
  // Drops a gather that is under way, since it reads the pieces.
  void pieces_change();

  // Gathers the outer ranks' pieces; does not block. REQUIRES: are_to_be_issued().
  // Collective over the outer dimension.
  void issue(NoticeWords words, Layouts layouts);
  // Puts the pieces together. Gives what the outer ranks said; nothing where no words
  // travel, or nothing is under way. Throws what failed; they are stale then as before.
  std::vector<NoticeWords> wait();
  void agreed() { is_stale_ = false; }

  // To be gathered by the calling thread's stream. REQUIRES: not stale.
  PackedRow row() { return row_.row(); }

 private:
  PackedRow pieces();
  std::vector<int64_t> lengths_of_column() const;
  void unpack(const GatheredRows& rows);

  const GroupInfo& info_;
  const std::vector<FSDPParam>& params_;
  const ShardBuffer& shards_;
  RowMemory row_;
  std::unique_ptr<RowMemory> staging_;  // of pieces; null: they are sent as they are
  bool is_stale_ = true;
  AllGather gather_;
  CodecFailure failure_;
};

}  // namespace fsdp::internal
