#include "checkpoint/internal/world.h"

#include "device_mesh/process_group.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cstring>
#include <exception>

namespace fsdp::internal::checkpoint {
namespace {

constexpr int64_t kShort = 1016;
constexpr int64_t kLengthBytes = sizeof(int64_t);

// One all-gather of each rank's length and the first `room` bytes of its text.
at::Tensor gather_texts(const World& world, const std::string& mine, int64_t room,
                        const std::string& what) {
  at::Tensor row = at::zeros({kLengthBytes + room}, at::kByte);
  const auto length = static_cast<int64_t>(mine.size());
  std::memcpy(row.mutable_data_ptr(), &length, kLengthBytes);
  std::memcpy(static_cast<char*>(row.mutable_data_ptr()) + kLengthBytes, mine.data(),
              static_cast<size_t>(std::min(length, room)));
  // "save /a/path": paths may differ, which the texts tell; calls may not.
  const std::string call = what.substr(0, what.find(' '));
  return world.collectives().rows_of_ranks({.row = row, .what = what, .call = call});
}

int64_t length_at(const at::Tensor& row) {
  int64_t length = 0;
  std::memcpy(&length, row.const_data_ptr(), kLengthBytes);
  return length;
}

}  // namespace

World default_world() {
  if (!is_process_group_initialized()) return {};
  World world{.group = std::make_shared<const Group>(default_process_group())};
  world.rank = group_rank(*world.group);
  world.size = group_size(*world.group);
  return world;
}

std::vector<std::string> exchange(const World& world, const std::string& mine,
                                  const std::string& what) {
  if (!world.group || world.size == 1) return {mine};
  at::Tensor rows = gather_texts(world, mine, kShort, what);
  int64_t longest = 0;
  for (int64_t rank = 0; rank < world.size; ++rank) {
    longest = std::max(longest, length_at(rows[rank]));
  }
  if (longest > kShort) rows = gather_texts(world, mine, longest, what);
  std::vector<std::string> texts;
  for (int64_t rank = 0; rank < world.size; ++rank) {
    const at::Tensor row = rows[rank];
    texts.emplace_back(static_cast<const char*>(row.const_data_ptr()) + kLengthBytes,
                       static_cast<size_t>(length_at(row)));
  }
  return texts;
}

Failure attempt(const std::function<void()>& work) {
  try {
    work();
    return {};
  } catch (const c10::ValueError& error) {
    return {true, error.what_without_backtrace()};
  } catch (const c10::Error& error) {
    return {false, error.what_without_backtrace()};
  } catch (const std::exception& error) {
    return {false, error.what()};
  }
}

std::vector<std::string> agree(const World& world, const Failure& mine, const std::string& said,
                               const std::string& what) {
  const bool failed = !mine.text.empty();
  const std::string text =
      failed ? std::string(mine.is_value_error ? "V" : "E") + mine.text : "O" + said;
  auto texts = exchange(world, text, what);
  std::string failures;
  bool only_values = true;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank][0] == 'O') continue;
    only_values &= texts[rank][0] == 'V';
    if (!failures.empty()) failures += "; ";
    if (world.size > 1) failures += "rank " + std::to_string(rank) + ": ";
    failures += texts[rank].substr(1);
  }
  TORCH_CHECK_VALUE(failures.empty() || !only_values, what, ": ", failures);
  TORCH_CHECK(failures.empty(), what, ": ", failures);
  for (std::string& each : texts) each.erase(0, 1);
  return texts;
}

}  // namespace fsdp::internal::checkpoint
