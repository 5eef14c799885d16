#include "fully_shard/transport/host_exchange.h"

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/operation_record.h"
#include "device_mesh/collectives/words_and_texts.h"
#include "fully_shard/host_exchange.h"

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

// The last gather and the last reduction: what a rank's text begins with, before its
// words.
using Issued = std::array<Stamp, 2>;
constexpr int64_t kRoom = 2040;  // bytes

constexpr char kWhat[] = "host exchange at the end of a backward";

Issued issued_in(const std::string& text) {
  Issued issued;
  std::memcpy(static_cast<void*>(issued.data()), text.data(), sizeof issued);
  return issued;
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
  const Issued issued = {gathers_.log()->last_stamp(), reductions_.log()->last_stamp()};
  std::string text(reinterpret_cast<const char*>(issued.data()), sizeof issued);
  text.append(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(uint64_t));
  const auto texts =
      texts_of_all({host_}, {.text = text, .what = kWhat, .call = kWhat, .room = kRoom});
  check_order(texts);
  std::vector<Words> all;
  for (const auto& said : texts) {
    auto& theirs = all.emplace_back((said.size() - sizeof issued) / sizeof(uint64_t));
    std::memcpy(theirs.data(), said.data() + sizeof issued, said.size() - sizeof issued);
  }
  return all;
}

void HostExchange::check_order(const std::vector<std::string>& texts) {
  const bool is_one_order = std::all_of(texts.begin(), texts.end(), [&](const std::string& text) {
    return issued_in(text) == issued_in(texts.front());
  });
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
  const auto texts = texts_of_all(
      {host_},
      {.text = to_text(gathers_.log()->recent_operations()), .what = kWhat, .call = kWhat});
  std::map<int64_t, std::vector<RecordedOperation>> records;
  for (size_t rank = 0; rank < texts.size(); ++rank)
    records[gathers_.log()->ranks()[rank]] = parse_operations(texts[rank]);
  return internal::first_difference(records);
}

}  // namespace fsdp::internal
