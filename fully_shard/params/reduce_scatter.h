// Reduce-scatter and, for hybrid sharding, all-reduce of one group's gradients (PyTorch's
// foreach_reduce), stage by stage:
//
//   packed    full gradients in rows, one per rank
//   sent      the transport adds the rows up (16-bit types in float), or codes of them
//             (GradientCodecs)
//   shared    hybrid sharding: this rank's row is added up over the replicas as well; with
//             HFSDP each of them gets the sum of its piece alone
//   received  this rank's row, summed
//
// Then its ReducedRow is divided, brought to where the shards are, and published: cast to
// the parameters' dtype and added into the entries' .grad.
//
// Where the unit does not reduce over its replicas, the received row is kept for a later
// reduction instead (PartialReduceOutput), and nothing is published. Destroying it in
// between drops it; what was sent is waited for. Everything runs on the reduce stream
// (ReduceStream), but what a ReducedRow does. Collective over the group's
// mesh, in one order on all ranks.
#pragma once

#include "fully_shard/params/error_feedback.h"
#include "fully_shard/params/fsdp_param.h"
#include "fully_shard/params/group_info.h"
#include "fully_shard/transport/codec_failure.h"
#include "fully_shard/transport/packed_layout.h"
#include "fully_shard/transport/row_codes.h"
#include "fully_shard/transport/streams.h"
#include "fully_shard/transport/transport.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

namespace fsdp::internal {

class FSDPParamGroup;

struct TrainableParam {
  int64_t index = 0;  // in the group
  ShardExtent extent = {};
  std::vector<int64_t> shard_shape = {};  // of this rank's part
};

// The reduce-scatter input of one group and dtype (PyTorch's reduce_scatter_input): each
// full gradient is packed into its rows as soon as autograd delivers it, so a complete
// group leaves without another copy.
//
//   row r, sent to rank r:  | flags | chunk r of parameter 0 | chunk r of parameter 1 | ... |
//
// The rows are memory of the stream that is current when the input is made. Each
// gradient is packed on the stream that is current then.
//
// Flags add up to the number of ranks that raised them: one per parameter that was used,
// and one for gradients that came after their reduction had left. Where the transport
// reads none (Transport::reads_flags) the rows have none, and the ranks tell each other
// which parameters were used, if they can (step/exchange_after_backward.cc).
class ReduceScatterInput {
 public:
  enum class Late { kNone, kSome };

  // `codec`: what it, or its sum, will be sent as; null: as it is.
  ReduceScatterInput(std::vector<TrainableParam> params, at::ScalarType dtype, Transport& transport,
                     c10::Device device, const GatherCodec* codec);
  ~ReduceScatterInput();
  ReduceScatterInput(ReduceScatterInput&&) = default;
  ReduceScatterInput& operator=(ReduceScatterInput&&) = default;

  at::ScalarType dtype() const { return dtype_; }
  int64_t row_bytes() const { return flag_bytes() + layout_.row_bytes(); }
  // Of its rows, if they are to be sent as codes; nothing: without.
  std::optional<RowCodes> codes(const std::shared_ptr<const GatherCodec>& codec) const;
  int64_t elements_of_a_row() const;  // behind the flags
  // How many bytes at the start of each row are used. Empty if every row is fully used.
  std::vector<int64_t> lengths() const;
  int64_t nbytes() const { return static_cast<int64_t>(rows_.nbytes()); }
  bool complete() const { return arrived_count_ == static_cast<int64_t>(params_.size()); }
  // The same, without waiting for those of which waits(index in the group) is true.
  template <class Waits>
  bool complete_but_for(const Waits& waits) const {
    if (complete()) return true;
    for (size_t i = 0; i < params_.size(); ++i) {
      if (!arrived_[i] && !waits(params_[i].index)) return false;
    }
    return true;
  }
  const std::vector<TrainableParam>& params() const { return params_; }
  // Position of group parameter `index` here, or -1.
  int64_t position(int64_t index) const;

  // Casts `gradient`, which is full size, to this dtype. Adds to what arrived before.
  void add(int64_t position, const at::Tensor& gradient);
  // Fills what has not arrived with zeros and hands the rows over (uint8, [ranks, row
  // bytes]), packed. REQUIRES: the stream they belong to is current.
  at::Tensor release_rows(Late late);

  // Whether this rank used each parameter. REQUIRES: released.
  const std::vector<bool>& used_here() const { return arrived_; }
  // The ranks told each other which parameters some rank used.
  void set_used(std::vector<bool> used) { used_ = std::move(used); }

  int64_t first_element() const;  // of a row, behind the flags
  // Of a reduced row, this rank's, of any dtype: its part of parameter `position`, in the
  // shape of the shard; and whether any rank used each parameter. Where flags are not
  // read and nothing was told, all count as used.
  at::Tensor part(const at::Tensor& row, int64_t position) const;
  std::vector<bool> used(const at::Tensor& row) const;
  // All gradients of the row and the padding between them: [elements], as far as the row
  // goes. A view.
  at::Tensor elements(const at::Tensor& row) const;
  // Adds `part`, of a parameter that some rank used, to its place in a reduced row.
  void add_part(at::Tensor& row, int64_t position, const at::Tensor& part);
  // Whether some rank had late gradients. Never where flags are not read.
  bool late(const at::Tensor& row) const;

 private:
  void write_flags(Late late);
  int64_t flag_count() const { return reads_flags_ ? static_cast<int64_t>(params_.size()) + 1 : 0; }
  int64_t flag_bytes() const;
  // Whether each flag of the row is raised by some rank.
  std::vector<bool> read_flags(const at::Tensor& row) const;

  std::vector<TrainableParam> params_;
  int64_t shard_count_, shard_rank_;
  bool reads_flags_;
  PackedLayout layout_;
  at::ScalarType dtype_;
  at::Tensor rows_, chunks_;  // uint8 [ranks, bytes]; what of them is behind the flags
  StreamMemory memory_{StreamWait::kPackAfterAllocation, StreamWait::kReduceAfterPacking};
  std::vector<bool> arrived_;
  int64_t arrived_count_ = 0;
  std::vector<bool> used_;  // by some rank, where they told each other; else empty
};

// How the gradients of a group are reduced: dtype, divisor, hook, and over which ranks
// (PyTorch's reduce_dtype, gradient_divide_factor, all_reduce_hook, reduce_grads and
// all_reduce_grads of FSDPParamGroup). Local.
class ReduceSettings {
 public:
  // `info` outlives it.
  ReduceSettings(const GroupInfo& info, const std::vector<FSDPParam>& params);
  ReduceSettings(const ReduceSettings&) = delete;

  // Gradients are added up, over backwards and over the ranks, in `dtype` instead of the
  // parameters' own; complex ones stay what they are.
  void set_dtype(std::optional<at::ScalarType> dtype) { dtype_ = dtype; }
  at::ScalarType dtype_of(const FSDPParam& param) const;

  // Called with the sum over all ranks, [elements] of sum_dtype, before it is divided,
  // once per reduction and in the same order on all ranks; what it writes is published.
  using Hook = std::function<void(const at::Tensor& sum)>;
  void set_hook(Hook hook) { hook_ = std::move(hook); }
  // `row`: a received row of `input`.
  void run_hook(const ReduceScatterInput& input, const at::Tensor& row) const;

  double divisor() const;
  // Hybrid sharding: reductions go on over the replicas.
  bool reduces_over_replicas() const;
  // One rank, where no hook wants rows: gradients go to the entries at once.
  bool stays_here() const;
  // Parameters that no rank used get zeros, not nothing.
  bool publishes_unused() const;

  // Of the group's next reduction: draws that no other one has, of this rank alone.
  uint64_t next_seed();
  const std::shared_ptr<ErrorFeedback>& feedback() const { return feedback_; }

 private:
  const GroupInfo& info_;
  bool has_replicated_members_;  // tensor-parallel ones
  int64_t batches_beside_;       // on ranks of the members' own mesh
  std::optional<at::ScalarType> dtype_ = {};
  Hook hook_ = {};
  uint64_t reductions_ = 0;
  std::shared_ptr<ErrorFeedback> feedback_;
};

// What a reduction brought. It may wait for the last of several backwards, and the
// group's driver keeps it meanwhile. It finds the group through its unit: even an
// intrusive weak pointer would delay the group's destructor.
class ReducedRow {
 public:
  ReducedRow(std::shared_ptr<Unit> unit, ReduceScatterInput input, at::Tensor row,
             std::unique_ptr<Remainder> remainder);
  // Divides it on the calling thread's stream; where the shards are in host memory, its
  // copy goes there, to be waited for. Nothing where the group is gone. At most once.
  void bring_home(CopiesToHost& copies);
  // Casts and adds into the entries' .grad, on the calling thread's stream. Nothing where
  // the group is gone. At most once. REQUIRES: at home, and waited for.
  void publish();
  const Unit& unit() const { return *unit_; }

 private:
  c10::intrusive_ptr<FSDPParamGroup> group() const;

  std::shared_ptr<Unit> unit_;  // knows its group as long as there is one
  ReduceScatterInput input_;
  at::Tensor row_;  // [elements], of sum_dtype
  std::unique_ptr<Remainder> remainder_;
};

// The stages up to the received row.
class GradientReduction {
 public:
  GradientReduction(c10::intrusive_ptr<FSDPParamGroup> group, ReduceScatterInput input);
  ~GradientReduction();
  GradientReduction(GradientReduction&&) noexcept;

  void send(ReduceScatterInput::Late late);
  // Waits for the sum over the shards, and shares it with the replicas. REQUIRES: sent.
  // Throws what went wrong, with the unit's name.
  void receive();
  // Waits for the replicas. REQUIRES: receive() was called.
  void wait_for_replicas();
  // Where the ranks tell each other on the host (step/exchange_after_backward.cc): what
  // it sent, and what others said, of the replicas where it went over them.
  const ReduceScatterInput& input() const { return input_; }
  void set_used(const std::vector<bool>& used) {
    input_.set_used(used);
    if (pieces_) pieces_->set_used(used);
  }
  void set_words_of_replicas(std::vector<NoticeWords> words) { words_ = std::move(words); }
  // Throws ValueError, on all ranks alike, where replicas did not write the shards alike.
  // Nothing where the row was not added up over them. REQUIRES: wait_for_replicas() was
  // called.
  void check_replica_writes();
  // Some rank had gradients that came after their reduction had left: a rank of the
  // replicas too, where the row was added up over them. REQUIRES: wait_for_replicas() was
  // called.
  bool announces_late() const;
  bool is_over_replicas() const;
  // Keeps the row, if it did not go over the replicas, for a reduction that does. At most
  // once. REQUIRES: wait_for_replicas() was called.
  void keep_unless_over_replicas();
  // What is to be published; nothing where the row is kept. REQUIRES: wait_for_replicas()
  // was called.
  std::optional<ReducedRow> result() &&;

  FSDPParamGroup& group() const { return *group_; }

 private:
  struct Packed {};
  // `sum`: none once it was waited for.
  struct Sent {
    enum class Over { kShards, kReplicas } over;
    std::optional<InFlight<SummedRow>> sum;
  };
  struct Received {
    at::Tensor row;  // [elements], of sum_dtype
    enum class Use { kPublish, kKept } use;
  };
  ReduceStream& reduce_stream() const;
  std::optional<InFlight<SummedRow>> take_in_flight();
  void put_in_flight(Sent::Over over, InFlight<SummedRow> sum);
  at::Tensor wait_for_sum();
  InFlight<SummedRow> reduce(Transport& transport, ReduceScatterInput& input,
                             ReduceScatterInput::Late late, const std::optional<RowCodes>& codes,
                             const at::Tensor& residual, Issue issue);
  at::Tensor take_remainder(c10::IntArrayRef shape, const at::Tensor& like);
  void send_to_replicas(at::Tensor row);
  void send_pieces(const at::Tensor& row);
  std::vector<TrainableParam> pieces_of(const at::Tensor& row) const;
  void receive_whole(at::Tensor row);
  const ReduceScatterInput& input_of_row() const;  // of the last row that was received

  c10::intrusive_ptr<FSDPParamGroup> group_;
  ReduceScatterInput input_;
  std::optional<ReduceScatterInput> pieces_;  // HFSDP: of the reduction over the outer ranks
  std::variant<Packed, Sent, Received> stage_;
  CodecFailure failure_;            // of what was sent last
  std::vector<NoticeWords> words_;  // of the ranks, with what was waited for last
  std::unique_ptr<Remainder> remainder_;
};

}  // namespace fsdp::internal
