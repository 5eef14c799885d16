#include "fully_shard/transport/host_exchange.h"

#include "device_mesh/collectives/agreement.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/operation_record.h"
#include "fully_shard/host_exchange.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <utility>

namespace fsdp {
namespace {

std::atomic<bool> host_exchange_is_on{true};

}  // namespace

void set_host_exchange(bool on) { host_exchange_is_on = on; }
bool host_exchange() { return host_exchange_is_on; }

}  // namespace fsdp

namespace fsdp::internal {
namespace {

// A row: what was issued, how many words there are, and the first ones of them. The
// others take one more exchange.
struct Head {
  std::array<Stamp, 2> issued = {};  // the last gather and the last reduction
  uint64_t count = 0;
};
constexpr size_t kHeadWords = sizeof(Head) / sizeof(uint64_t);
constexpr size_t kRowWords = 256;
constexpr size_t kFirstWords = kRowWords - kHeadWords;

constexpr char kWhat[] = "host exchange at the end of a backward";

// int64 [words]: `words`, and zeros behind them.
at::Tensor row_of(const uint64_t* words, size_t count, size_t length) {
  auto row = at::zeros({static_cast<int64_t>(length)}, at::kLong);
  if (count > 0) std::memcpy(row.mutable_data_ptr(), words, count * sizeof(uint64_t));
  return row;
}

const uint64_t* row_at(const at::Tensor& rows, size_t rank) {
  const auto* const first = static_cast<const uint64_t*>(rows.const_data_ptr());
  return first + rank * static_cast<size_t>(rows.size(1));
}

Head head_at(const at::Tensor& rows, size_t rank) {
  Head head;
  std::memcpy(static_cast<void*>(&head), row_at(rows, rank), sizeof head);
  return head;
}

}  // namespace

HostExchange::HostExchange(Collectives gathers, Collectives reductions)
    : gathers_(std::move(gathers)),
      reductions_(std::move(reductions)),
      host_(Collectives::of(reductions_.group(), c10::kCPU)) {}

std::vector<HostExchange::Words> HostExchange::run(const Words& words) {
  return gathers_.log()->watch([&] {
    gathers_.log()->check_usable(kWhat);
    return exchange(words);
  });
}

std::vector<HostExchange::Words> HostExchange::exchange(const Words& words) {
  const Head head = {{gathers_.log()->last_stamp(), reductions_.log()->last_stamp()}, words.size()};
  const auto first_count = std::min(words.size(), kFirstWords);
  auto row = row_of(reinterpret_cast<const uint64_t*>(&head), kHeadWords, kRowWords);
  auto* const behind_head = static_cast<uint64_t*>(row.mutable_data_ptr()) + kHeadWords;
  std::copy_n(words.data(), first_count, behind_head);
  const auto rows = host_.rows_of_ranks({.row = row, .what = kWhat, .call = kWhat});
  check_order(rows);

  std::vector<Words> all;
  size_t longest = 0;
  for (size_t rank = 0; rank < static_cast<size_t>(host_.size()); ++rank) {
    const auto count = static_cast<size_t>(head_at(rows, rank).count);
    longest = std::max(longest, count);
    const auto* const first = row_at(rows, rank) + kHeadWords;
    all.emplace_back(first, first + std::min(count, kFirstWords));
    all.back().resize(count);
  }
  if (longest <= kFirstWords) return all;
  const auto rest = host_.rows_of_ranks(
      {.row = row_of(words.data() + first_count, words.size() - first_count, longest - kFirstWords),
       .what = kWhat,
       .call = kWhat});
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].size() > kFirstWords)
      std::copy_n(row_at(rest, rank), all[rank].size() - kFirstWords, &all[rank][kFirstWords]);
  }
  return all;
}

void HostExchange::check_order(const at::Tensor& rows) {
  const auto issued = head_at(rows, 0).issued;
  bool is_one_order = true;
  for (size_t rank = 1; rank < static_cast<size_t>(rows.size(0)); ++rank)
    is_one_order &= head_at(rows, rank).issued == issued;
  if (is_one_order) return;
  const auto difference = first_difference();
  TORCH_CHECK(
      false, "collectives are out of order: the ranks part at ",
      difference.empty() ? "an operation further back than their records reach" : difference,
      ". Every rank must issue the same collectives in the same order: touch the sharded "
      "units alike. This backward's gradients were dropped; every rank gets this error "
      "(rank ",
      gathers_.log()->global_rank(), ")");
}

std::string HostExchange::first_difference() {
  const auto texts =
      texts_of_all({host_}, {.text = to_text(gathers_.log()->recent_operations()), .what = kWhat});
  std::map<int64_t, std::vector<RecordedOperation>> records;
  for (size_t rank = 0; rank < texts.size(); ++rank)
    records[gathers_.log()->ranks()[rank]] = parse_operations(texts[rank]);
  return internal::first_difference(records);
}

}  // namespace fsdp::internal
