#include "checkpoint/ranks/world.h"

#include "device_mesh/collectives/words_and_texts.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "device_mesh/process_group.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>

namespace fsdp::internal::checkpoint {
namespace {

// "save /a/path": paths may differ, which the texts tell; calls may not.
std::string call_of(const std::string& what) { return what.substr(0, what.find(' ')); }

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
  return texts_of_all({world.collectives()}, {.text = mine, .what = what, .call = call_of(what)});
}

std::vector<std::string> exchange(const DeviceMesh& mesh, const std::string& mine,
                                  const std::string& what) {
  return texts_of_all(
      collectives_of(mesh),
      {.text = mine, .what = what, .call = call_of(what), .device = local_device(mesh)});
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
