#include "checkpoint/save/per_rank.h"

#include "checkpoint/format/dtype.h"
#include "checkpoint/format/ivalue_json.h"
#include "checkpoint/io/tensor_reader.h"
#include "checkpoint/plan/state_items.h"
#include "device_mesh/internal/accelerator.h"
#include "device_mesh/process_group.h"
#include "dtensor/dtensor.h"
#include "dtensor/random/thread_generators.h"

#include <ATen/Context.h>
#include <ATen/core/Dict.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <memory>
#include <thread>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

constexpr const char* kThreadGenerators = "rng.manual_seed";
constexpr const char* kValues = "values";

// "cpu", "cuda" and their like.
std::string name_of(c10::DeviceType type) { return c10::DeviceTypeName(type, /*lower_case=*/true); }
// LibTorch's default generator of the device type.
std::string generator_name(c10::DeviceType type) { return "rng." + name_of(type); }

// A group of a thread is not another thread's.
bool ranks_are_threads(const World& world) {
  if (!world.group || world.size == 1) return false;
  bool shared = false;
  std::thread([&] {
    shared = is_process_group_initialized() && default_process_group() == *world.group;
  }).join();
  return !shared;
}

at::Generator default_generator(c10::DeviceType type) {
  return at::globalContext().defaultGenerator(current_device(type));
}

using Dict = c10::impl::GenericDict;

Dict saved(ThreadGenerators& generators) {
  Dict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("seed", static_cast<int64_t>(generators.seed()));
  dict.insert("ranks", generators.ranks());
  dict.insert("cpu", generator_state(generators.on(c10::kCPU)));
  if (const auto type = visible_accelerator())
    dict.insert(name_of(*type), generator_state(generators.on(*type)));
  return dict;
}

ThreadGeneratorsPtr restored(const Dict& dict) {
  auto generators = std::make_shared<ThreadGenerators>(
      static_cast<uint64_t>(dict.at("seed").toInt()), dict.at("ranks").toIntVector());
  set_generator_state(generators->on(c10::kCPU), dict.at("cpu").toTensor());
  const auto type = visible_accelerator();
  if (type && dict.contains(name_of(*type)))
    set_generator_state(generators->on(*type), dict.at(name_of(*type)).toTensor());
  return generators;
}

}  // namespace

PerRank generator_states(const World& world) {
  const auto& own = thread_generators();
  PerRank states;
  if (own) states.emplace(kThreadGenerators, saved(*own));
  if (ranks_are_threads(world)) {
    TORCH_CHECK_VALUE(own,
                      "rng: these ranks are threads of one process and share its generator; "
                      "with fsdp::manual_seed each has its own");
    return states;
  }
  states.emplace(generator_name(c10::kCPU), generator_state(default_generator(c10::kCPU)));
  if (const auto type = visible_accelerator())
    states.emplace(generator_name(*type), generator_state(default_generator(*type)));
  return states;
}

void restore_generators(PerRank& values) {
  const auto accelerator = visible_accelerator();
  const auto own = values.extract(kThreadGenerators);
  const auto cpu = values.extract(generator_name(c10::kCPU));
  const auto device =
      accelerator ? values.extract(generator_name(*accelerator)) : PerRank::node_type();
  forget_generators(values);  // those of accelerators that are not here
  if (own || cpu)
    exchange_thread_generators(own ? restored(own.mapped().toGenericDict()) : nullptr);
  if (cpu) set_generator_state(default_generator(c10::kCPU), cpu.mapped().toTensor());
  if (device) set_generator_state(default_generator(*accelerator), device.mapped().toTensor());
}

void forget_generators(PerRank& values) {
  values.erase(kThreadGenerators);
  values.erase(generator_name(c10::kCPU));
  for (const auto type : accelerator_types()) values.erase(generator_name(type));
}

FileToWrite per_rank_file(int64_t rank, const PerRank& values) {
  TensorsByName tensors;
  Json json = Json::object();
  for (const auto& [name, value] : values) json[name] = to_json(value, name, &tensors);
  FileToWrite file{.path = rank_path(rank), .rank = rank, .kind = FileKind::kPerRank};
  file.metadata = {{kValues, text_of(json, "State::per_rank")}};
  for (const auto& [name, tensor] : tensors) {
    TORCH_CHECK_VALUE(!is_dtensor(tensor) && dtype_name(tensor.scalar_type()), "save: '", name,
                      "' is a DTensor or a ", tensor.scalar_type(),
                      ", which State::per_rank cannot hold");
    Entry entry{.name = name, .tensor = name, .dtype = tensor.scalar_type()};
    entry.box = whole_box(tensor.sizes().vec());
    entry.global_shape = tensor.sizes().vec();
    file.parts.push_back({std::move(entry), tensor});
  }
  lay_out(file);
  return file;
}

absl::StatusOr<PerRank> read_per_rank(const std::string& folder, const Manifest& manifest,
                                      int64_t rank, bool verify) {
  const auto record = manifest.files.find(rank_path(rank));
  if (record == manifest.files.end()) {
    return absl::DataLossError(folder + ": has no per-rank items of rank " + std::to_string(rank));
  }
  auto file = VerifiedFile::open(
      {folder + "/" + record->first, record->second.bytes, record->second.checksum}, verify);
  if (!file.ok()) return file.status();
  TensorsByName tensors;
  BlockBuffer buffer;
  for (const Entry& entry : file->header().entries) {
    const at::Tensor tensor = at::empty(lengths_of(entry.box), at::TensorOptions(entry.dtype));
    auto read = file->read(tensor.mutable_data_ptr(), bytes_of(entry), entry.begin, buffer);
    if (!read.ok()) return read;
    tensors.emplace(entry.name, tensor);
  }
  auto json = parse_json(file->header().metadata.at(kValues), folder + "/" + record->first);
  if (!json.ok()) return json.status();
  PerRank values;
  for (const auto& [name, value] : json->items()) values.emplace(name, from_json(value, tensors));
  return values;
}

}  // namespace fsdp::internal::checkpoint
