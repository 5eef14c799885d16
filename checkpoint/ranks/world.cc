#include "checkpoint/ranks/world.h"

#include "device_mesh/collectives/agreement.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
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

// The ranks of a world or of a mesh, and the device through which they talk.
struct Ranks {
  std::vector<Collectives> dims;
  c10::Device device = c10::kCPU;
};

// Each rank's length and the first `room` bytes of its text.
at::Tensor gather_texts(const Ranks& ranks, const std::string& mine, int64_t room,
                        const std::string& what) {
  at::Tensor row = at::zeros({kLengthBytes + room}, at::kByte);
  const auto length = static_cast<int64_t>(mine.size());
  std::memcpy(row.mutable_data_ptr(), &length, kLengthBytes);
  std::memcpy(static_cast<char*>(row.mutable_data_ptr()) + kLengthBytes, mine.data(),
              static_cast<size_t>(std::min(length, room)));
  // "save /a/path": paths may differ, which the texts tell; calls may not.
  const std::string call = what.substr(0, what.find(' '));
  return rows_of_all(ranks.dims, {.row = row.to(ranks.device), .what = what, .call = call}).cpu();
}

int64_t length_at(const at::Tensor& row) {
  int64_t length = 0;
  std::memcpy(&length, row.const_data_ptr(), kLengthBytes);
  return length;
}

std::vector<std::string> exchange_over(const Ranks& ranks, const std::string& mine,
                                       const std::string& what) {
  at::Tensor rows = gather_texts(ranks, mine, kShort, what);
  int64_t longest = 0;
  for (int64_t place = 0; place < rows.size(0); ++place) {
    longest = std::max(longest, length_at(rows[place]));
  }
  if (longest > kShort) rows = gather_texts(ranks, mine, longest, what);
  std::vector<std::string> texts;
  for (int64_t place = 0; place < rows.size(0); ++place) {
    const at::Tensor row = rows[place];
    texts.emplace_back(static_cast<const char*>(row.const_data_ptr()) + kLengthBytes,
                       static_cast<size_t>(length_at(row)));
  }
  return texts;
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
  return exchange_over({.dims = {world.collectives()}}, mine, what);
}

std::vector<std::string> exchange(const DeviceMesh& mesh, const std::string& mine,
                                  const std::string& what) {
  return exchange_over({collectives_of(mesh), local_device(mesh)}, mine, what);
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

void throw_any(const Failures& failures, bool is_alone, const std::string& what) {
  std::string text;
  bool only_values = true;
  for (const auto& [rank, failure] : failures) {
    only_values &= failure.is_value_error;
    if (!text.empty()) text += "; ";
    if (!is_alone) text += "rank " + std::to_string(rank) + ": ";
    text += failure.text;
  }
  TORCH_CHECK_VALUE(failures.empty() || !only_values, what, ": ", text);
  TORCH_CHECK(failures.empty(), what, ": ", text);
}

std::vector<std::string> agree(const World& world, const Failure& mine, const std::string& said,
                               const std::string& what) {
  const bool failed = !mine.text.empty();
  const std::string text =
      failed ? std::string(mine.is_value_error ? "V" : "E") + mine.text : "O" + said;
  auto texts = exchange(world, text, what);
  Failures failures;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const char kind = texts[rank][0];
    texts[rank].erase(0, 1);
    if (kind != 'O') failures[static_cast<int64_t>(rank)] = {kind == 'V', texts[rank]};
  }
  throw_any(failures, world.size == 1, what);
  return texts;
}

}  // namespace fsdp::internal::checkpoint
