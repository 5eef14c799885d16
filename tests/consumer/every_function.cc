// Uses each function of the public headers once, in a world of one: what the headers
// declare the library has. Prints "every function" at the end. Its argument is a folder
// of its own.
#include "checkpoint/async_save.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/convert.h"
#include "checkpoint/inspect.h"
#include "checkpoint/name_map.h"
#include "checkpoint/optimizer_state_dict.h"
#include "checkpoint/state_dict.h"
#include "device_mesh/all_reduce.h"
#include "device_mesh/debug.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/process_group.h"
#include "dtensor/context_parallel.h"
#include "dtensor/dtensor.h"
#include "dtensor/manual_seed.h"
#include "experts/route_to_experts.h"
#include "fully_shard/fully_shard.h"
#include "optim/muon.h"
#include "optim/muon_with_adamw.h"
#include "optim/owned_step.h"
#include "tensor_parallel/communication_log.h"
#include "tensor_parallel/parallelize_module.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

using fsdp::DeviceMesh;
using fsdp::FSDPModule;
using torch::nn::Linear;
using torch::nn::Sequential;

// Fails loudly where a result is not what it must be in a world of one.
void expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

Sequential two_layers() { return Sequential(Linear(4, 4), Linear(4, 4)); }

void use_device_mesh() {
  auto mesh = fsdp::init_device_mesh(torch::kCPU, {1, 1}, {"dp", "tp"});
  const auto group = mesh.group(0);
  expect(DeviceMesh::from_group(group, torch::kCPU, {0}, "x").ndim() == 1, "from_group");
  expect(DeviceMesh::from_groups({group, group}, torch::kCPU, {0}, {1, 1}, {"x", "y"}).size() == 1,
         "from_groups");
  expect(mesh.device_type() == torch::kCPU && mesh.size(1) == 1, "device_type and size");
  expect(mesh.shape().size() == 2 && mesh.dim_names()[1] == "tp", "shape and dim_names");
  expect(mesh.ranks().size() == 1 && mesh.rank() == 0, "ranks");
  expect(mesh.local_rank(1) == 0 && mesh.coordinate().size() == 2, "coordinates");
  expect(mesh.slice_index() == 0 && mesh.side_group(0, "consumer").defined(), "side_group");
  expect(mesh["dp"].beside(mesh["tp"]) == mesh[{"dp", "tp"}], "slices");
  expect(mesh[std::vector<std::string>{"tp"}] != mesh["dp"], "a slice of several names");
  expect(fsdp::covers(mesh, mesh["tp"], 0), "covers");
  expect(mesh.permute({1, 0}) == mesh[{"tp", "dp"}], "permute");
  expect(mesh.flatten({"dp", "tp"}, "all").ndim() == 1, "flatten");
  expect(mesh.neighbours(0, 1).size() == 1 && mesh.hash() == std::hash<DeviceMesh>()(mesh),
         "neighbours and hash");
  expect(fsdp::init_hybrid_mesh(torch::kCPU, 1).ndim() == 2, "init_hybrid_mesh");
  expect(fsdp::default_mesh().size() == 1, "default_mesh");
  expect(fsdp::local_device(mesh).is_cpu(), "local_device");
  expect(fsdp::is_rank_zero() && fsdp::all_reduce(2.5, mesh) == 2.5, "is_rank_zero");
  expect(fsdp::all_reduce(3, mesh, fsdp::Reduce::kMax) == 3, "all_reduce of an integer");
  expect(fsdp::all_reduce(torch::ones(2), mesh).sum().item<double>() == 2, "all_reduce");
  fsdp::barrier(mesh);
  std::ostringstream text;
  text << mesh;
  expect(text.str() == fsdp::to_string(mesh), "to_string");
}

void use_process_group() {
  const auto here = fsdp::launch_environment();
  expect(!fsdp::is_process_group_initialized(), "no default group yet");
  fsdp::ProcessGroupOptions options{.rank = 0, .world_size = 1};
  fsdp::StoreHandle store;
  store = fsdp::StoreHandle(c10::intrusive_ptr<c10d::Store>());
  expect(!store && !store.get().defined() && here.world_size == 1, "an empty store");
  options.store = fsdp::StoreHandle(store);
  fsdp::init_process_group(options);
  expect(fsdp::default_process_group().defined(), "a default group");
}

void use_dtensor(const DeviceMesh& mesh) {
  const auto whole = torch::rand({4, 4});
  fsdp::DTensor cut = fsdp::distribute_tensor(whole, mesh, {fsdp::Shard{0}});
  expect(fsdp::is_dtensor(cut) && cut.to_local().equal(whole), "to_local");
  expect(cut.redistribute({fsdp::Replicate{}}).full_tensor().equal(whole), "redistribute");
  expect(cut.device_mesh() == mesh && cut.placements()[0].is_shard(0), "placements");
  const at::Tensor handle = cut;
  expect(fsdp::full_tensor(fsdp::DTensor(handle)).equal(whole), "full_tensor");
  const auto sum = fsdp::from_local(whole, mesh, {fsdp::Partial{}}, {.check = true});
  const fsdp::Placement placement = sum.placements()[0];
  expect(placement.hash() == std::hash<fsdp::Placement>()(placement), "hash");
  expect(fsdp::Placement(fsdp::Shard{0}).along(1).shard_dim() == 1, "along");
  const fsdp::LocalUnits units({6, 0, 2});
  expect(units.can_cut() && units.at(2) == 1 && units.before(2) == 3 && units.total() == 4 &&
             units.most() == 3 && !units.owner() && units.to_string() == "[3, 0, 1]" &&
             units.hash() == fsdp::LocalUnits({3, 0, 1}).hash(),
         "local_units");
  expect(fsdp::LocalUnits::of_owner(2).owner() == 2, "of_owner");
  expect(fsdp::Placement(fsdp::RaggedShard{0, {3, 1}}).is_ragged(), "a ragged shard");
  expect(fsdp::Placement(fsdp::Owned{1}).can_lie_inside_a_cut(), "an owner");
  std::ostringstream text;
  text << placement << cut;
  expect(text.str().starts_with(fsdp::to_string(placement)), "to_string");
  fsdp::set_debug_options({.check_replicated = true});
  expect((cut + whole).sizes() == whole.sizes(), "operators");
  expect(fsdp::debug_options().check_replicated, "debug_options");
  fsdp::set_debug_options({});
  fsdp::manual_seed(1, mesh);
  fsdp::use_default_generator();
}

void use_handle(Sequential& model, FSDPModule unit, const DeviceMesh& mesh) {
  expect(unit.name().empty() && unit.is_root() && unit.modules().size() == 1, "a root");
  expect(unit.parameters().size() == 2 && unit.spans_single_mesh(), "parameters");
  expect(unit.counters().sharded_bytes == fsdp::counters(mesh).sharded_bytes, "counters");
  fsdp::reset_peak(mesh);
  fsdp::set_host_exchange(false);
  expect(!fsdp::host_exchange(), "host_exchange");
  fsdp::set_host_exchange(true);
  unit.unshard();
  unit.unshard_async().wait();
  unit.reshard();
  unit.set_requires_gradient_sync(true);
  unit.set_requires_all_reduce(true);
  unit.set_is_last_backward(true);
  expect(fsdp::ReshardAfterForward::to_world(2).world() == 2, "to_world");
  unit.set_reshard_after_forward(true);
  unit.set_reshard_after_backward(true);
  unit.set_unshard_in_backward(true);
  unit.set_backward_prefetch(fsdp::BackwardPrefetch::kPost);
  unit.set_full_precision(false);
  unit.set_modules_to_forward_prefetch({unit});
  unit.set_modules_to_backward_prefetch({unit});
  unit.set_gradient_divide_factor(1);
  unit.ignore({});
  unit.zero_pending_gradients();
  unit.reset_lazy_init();
  unit.set_all_reduce_hook({});
  unit.set_reduce_scatter_unused_params(false);
  unit.set_post_optim_event(nullptr);
  expect(fsdp::get_fsdp_module(*model) == unit && fsdp::is_fsdp_module(*model), "a unit");
  expect(fsdp::fsdp_modules(*model).size() == 2, "fsdp_modules");
  const auto marks = fsdp::annotations(*model);
  expect(marks.size() == 3 && marks[0].path.str().empty(), "annotations");
  expect(!fsdp::describe_units(*model).empty(), "describe_units");
}

// Replicated, since one rank's gathers need no other rank and so no function of their
// own.
void use_custom_collectives(const DeviceMesh& mesh) {
  const auto gather = fsdp::all_gather_over(mesh);
  const auto reduce = fsdp::reduce_scatter_over(mesh);
  const auto narrow = fsdp::compressed_reduce_scatter(mesh, at::kBFloat16);
  auto unit = fsdp::replicate(Linear(4, 4), mesh);
  for (const auto& set : {gather, fsdp::Communicate()}) {
    try {
      unit.set_custom_all_gather(set);
      unit.set_custom_reduce_scatter(set ? reduce : set);
    } catch (const c10::NotImplementedError&) {
    }
  }
  expect(narrow != nullptr, "compressed_reduce_scatter");
}

void use_policies(const DeviceMesh& mesh) {
  const auto layers = fsdp::by_type<Linear>();
  const auto policy =
      fsdp::by_any({fsdp::in_full_precision<torch::nn::LayerNorm>(), layers, fsdp::by_size(1'000),
                    fsdp::by_fn([](torch::nn::Module&) { return false; }),
                    fsdp::by_fn([](torch::nn::Module&, fsdp::FullyShardOptions options) {
                      return std::optional<fsdp::FullyShardOptions>(std::move(options));
                    })});
  auto model = two_layers();
  expect(policy.looks_below(*model, 40) && policy(*model, true, 40), "looks_below");
  expect(fsdp::every_module().choose(*model, 40, {}).has_value(), "choose");
  const fsdp::WrapPolicy by_hand([](torch::nn::Module&, int64_t) { return true; },
                                 [](torch::nn::Module&, int64_t, const fsdp::FullyShardOptions&) {
                                   return std::optional<fsdp::FullyShardOptions>();
                                 });
  expect(!by_hand.choose(*model, 40, {}), "a policy by hand");
  const fsdp::WrapPolicy in_one([](torch::nn::Module&, bool, int64_t) { return true; });
  expect(in_one(*model, true, 40), "a policy of one function");
  const auto plan = fsdp::plan_units(model, layers);
  std::ostringstream text;
  text << plan;
  expect(plan.units.size() == 3 && text.str() == fsdp::to_string(plan), "plan_units");
  fsdp::auto_shard(model, layers, mesh);
  expect(fsdp::fsdp_modules(*model).size() == 3, "auto_shard");
}

void train(Sequential& model, torch::optim::Optimizer& optimizer, const DeviceMesh& mesh) {
  const auto x = torch::rand({2, 4});
  fsdp::GradScaler scaler(mesh);
  {
    const fsdp::NoSyncGuard no_sync(fsdp::get_fsdp_module(*model));
    fsdp::forward(model, x).sum().backward();
  }
  const auto y = fsdp::checkpoint([&](const at::Tensor& in) { return model->forward(in); }, x);
  scaler.scale(y.sum()).backward();
  scaler.unscale_(optimizer);
  fsdp::clip_grad_norm_(model->parameters(), 1.0);
  expect(scaler.step(optimizer), "step");
  scaler.update();
  scaler.load_state(scaler.state());
  expect(scaler.get_scale() == scaler.state().scale, "get_scale");
  expect(fsdp::grad({model->forward(x).sum()}, {model->parameters()[0]}).size() == 1, "grad");
}

void use_full_values(Sequential& model) {
  const auto weight = model->parameters()[0];
  int64_t visited = 0;
  fsdp::for_each_full_param(*model, [&](const std::string&, const at::Tensor&) { ++visited; });
  expect(visited == 4, "for_each_full_param");
  fsdp::apply_unsharded(*model, [](torch::nn::Module&) {});
  { const fsdp::SummonFullParams full(model, {.writeback = false}); }
  { const fsdp::SummonFullParams full(fsdp::get_fsdp_module(*model)); }
  {
    fsdp::Unsharded pinned(weight);
    pinned.mark_written();
  }
  fsdp::mark_shard_written(weight);
}

void use_checkpoints(Sequential& model, torch::optim::Optimizer& optimizer,
                     const std::string& folder) {
  const auto path = folder + "/step-1", later = folder + "/step-2";
  fsdp::save({.model = model, .optimizer = optimizer, .values = {{"step", 1}}}, path, {.step = 1});
  fsdp::SaveHandle saving;
  saving = fsdp::async_save({.model = model, .optimizer = optimizer}, later, {.step = 2});
  saving.wait();
  expect(saving.is_done() && fsdp::latest_checkpoint(folder) == later, "latest_checkpoint");
  expect(fsdp::load({.model = model, .optimizer = optimizer}, path).step == 1, "load");
  fsdp::verify_checkpoint(path);
  expect(!fsdp::describe_checkpoint(path).empty(), "describe_checkpoint");
  const fsdp::NameMap names = {{"*", "layers.*"}};
  names.check({"0.weight", "1.bias"});
  const std::vector<fsdp::NameMap::Entry> entries = {{"0", "first"}};
  expect(fsdp::NameMap(entries)("0.weight") == "first.weight", "NameMap of a vector");
  expect(names.reversed()(names("0.weight")) == "0.weight", "NameMap");
  fsdp::convert_checkpoint(path, folder + "/export", {.name_in_file = names});
  const auto values = fsdp::get_model_state_dict(*model);
  expect(fsdp::set_model_state_dict(*model, values).missing.empty(), "set_model_state_dict");
  const auto state = fsdp::get_optimizer_state_dict(*model, optimizer);
  expect(fsdp::set_optimizer_state_dict(*model, optimizer, state).missing.empty(), "its state");
  fsdp::shard_full_optimizer_state(optimizer);
  expect(!fsdp::rekey(state, fsdp::KeyType::kId, *model, optimizer).state.empty(), "rekey");
  expect(!fsdp::unflatten(fsdp::flatten(state), *model, optimizer).state.empty(), "flatten");
}

void use_fully_shard(const DeviceMesh& mesh, const std::string& folder) {
  auto model = fsdp::deferred_init(two_layers);
  fsdp::separate_storages(two_layers());
  fsdp::broadcast_states(*two_layers(), mesh);
  fsdp::fully_shard(model[0]->as<Linear>()->shared_from_this(), mesh);
  const auto unit = fsdp::fully_shard(model, mesh);
  fsdp::materialize(*model);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  use_handle(model, unit, mesh);
  train(model, optimizer, mesh);
  use_full_values(model);
  use_checkpoints(model, optimizer, folder);
  fsdp::Profile profile(folder + "/trace.json", {.last_step = 1});
  profile.step();
  torch::jit::Module scripted("scripted");
  scripted.register_parameter("weight", torch::ones({2}), /*is_buffer=*/false);
  expect(fsdp::adopt(scripted)->parameters().size() == 1, "adopt");
  auto first = two_layers(), second = two_layers();
  fsdp::fully_shard({first.get(), second.get()}, mesh);
  auto third = two_layers();
  fsdp::replicate(std::vector<torch::nn::Module*>{third.get()}, mesh);
}

void use_codecs(const DeviceMesh& mesh) {
  for (const auto& codec : {fsdp::mxfp8(), fsdp::mxint8(), fsdp::fp8_rows(), fsdp::nf4()}) {
    fsdp::FullyShardOptions options;
    options.gather_codec_fn = [&](const auto&, const at::Tensor&) { return codec; };
    auto layer = Linear(torch::nn::LinearOptions(64, 2).bias(false));
    layer->weight.set_requires_grad(false);
    fsdp::fully_shard(layer, mesh, options);
    expect(fsdp::store_codes(layer) == 1, "store_codes");
  }
}

void use_experts(const DeviceMesh& mesh) {
  const auto before = fsdp::sequence_attention();
  fsdp::set_sequence_attention(fsdp::SequenceAttention::kRing);
  fsdp::set_sequence_attention(before);
  const auto tokens = torch::rand({3, 4});
  expect(fsdp::all_to_all(tokens, {3}, {3}, mesh).equal(tokens), "all_to_all");
  const fsdp::ExpertRouting routing{torch::zeros({3, 1}, at::kLong), torch::ones({3, 1}), 1};
  const auto matrix = torch::eye(4).unsqueeze(0);
  const auto linear = [&](const at::Tensor& rows, const at::Tensor& counts) {
    return fsdp::grouped_linear(rows, counts, matrix);
  };
  expect(fsdp::route_to_experts(tokens, routing, linear).equal(tokens), "experts of this rank");
  const auto same = [](int64_t, const at::Tensor& rows) { return rows; };
  expect(fsdp::route_to_experts(tokens, routing, mesh, fsdp::for_each_expert(same)).equal(tokens),
         "experts of a mesh");
}

void use_tensor_parallel(const DeviceMesh& mesh) {
  auto model = two_layers();
  fsdp::parallelize_module(model, mesh,
                           {{"0", fsdp::ColwiseParallel{}}, {"1", fsdp::RowwiseParallel{}}});
  fsdp::CommunicationLog log;
  const fsdp::RedistributionPolicy policy(fsdp::Redistribution::kExplicit);
  model->forward(torch::rand({2, 4})).sum().backward();
  for (const auto& entry : log.entries()) expect(!fsdp::to_string(entry).empty(), "to_string");
  expect(log.bytes() >= 0 && log.text().empty() == log.entries().empty(), "a log");
  log.clear();
}

void use_muon_with_adamw() {
  auto model = two_layers();
  const auto split = fsdp::split_for_muon(model);
  expect(split.matrices().size() == 2 && split.others().size() == 2, "split_for_muon");
  std::ostringstream text;
  text << split;
  expect(!text.str().empty(), "a split");
  fsdp::MuonWithAdamW both(split, fsdp::MuonOptions(1e-2), {1e-3});
  fsdp::MuonWithAdamW other(both.param_groups());
  model->forward(torch::rand({2, 4})).sum().backward();
  both.MuonWithAdamW::step();
  torch::serialize::OutputArchive saved;
  both.MuonWithAdamW::save(saved);
  std::stringstream bytes;
  saved.save_to(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(bytes);
  other.MuonWithAdamW::load(archive);
  expect(other.state().size() == 4 && both.counters().matrices == 2, "MuonWithAdamW");
  both.add_param_group({{torch::ones({2})}, std::make_unique<torch::optim::AdamWOptions>(1e-3)});
  expect(both.param_groups().size() == 3, "a group of MuonWithAdamW");
}

void use_owned_step(const torch::Tensor& weight) {
  fsdp::OwnedStep first({weight}, {.optimizer = "Mine"});
  fsdp::OwnedStep owned(std::move(first));
  owned = fsdp::OwnedStep({weight}, {.optimizer = "Mine"});
  expect(owned.computes(0) && fsdp::OwnedStep::local(owned.zeros(0, {3})).numel() == 3, "state");
  torch::Tensor applied;
  owned.run({0}, {.input = [&](size_t) { return weight; },
                  .compute = [](size_t, const torch::Tensor& whole) { return whole.mul(2); },
                  .apply = [&](size_t, const torch::Tensor& result) { applied = result; }});
  expect(applied.equal(weight.mul(2)), "OwnedStep");
}

void use_optim() {
  fsdp::MuonOptions options(1e-2), loaded_options;
  options.set_lr(2e-2);
  expect(options.get_lr() == 2e-2 && options == fsdp::MuonOptions(2e-2), "options of Muon");
  const auto weight = torch::ones({2, 2}).requires_grad_(true);
  fsdp::Muon muon({weight}, options);
  fsdp::Muon other(std::vector<torch::optim::OptimizerParamGroup>{{{weight}}}, options);
  weight.sum().backward();
  muon.step();
  expect(muon.counters().matrices == 1 && muon.counters().exchanges == 0, "counters of Muon");
  torch::serialize::OutputArchive of_muon, of_options, of_state;
  muon.save(of_muon);
  options.serialize(of_options);
  const auto& state = static_cast<const fsdp::MuonParamState&>(*muon.state().begin()->second);
  state.MuonParamState::serialize(of_state);
  fsdp::MuonParamState loaded_state;
  const auto load = [](torch::serialize::OutputArchive& saved, auto&& read) {
    std::stringstream bytes;
    saved.save_to(bytes);
    torch::serialize::InputArchive archive;
    archive.load_from(bytes);
    read(archive);
  };
  load(of_muon, [&](auto& archive) { other.Muon::load(archive); });
  load(of_options, [&](auto& archive) { loaded_options.MuonOptions::serialize(archive); });
  load(of_state, [&](auto& archive) { loaded_state.MuonParamState::serialize(archive); });
  expect(other.state().size() == 1 && loaded_options == options && loaded_state == state,
         "what was saved of Muon");
  muon.add_param_group(torch::optim::OptimizerParamGroup({torch::ones({2, 2})}));
  expect(muon.param_groups().size() == 2, "a group of Muon");
  use_muon_with_adamw();
  use_owned_step(weight);
}

}  // namespace

int main(int, char** arguments) {
  use_process_group();
  const auto mesh = fsdp::init_device_mesh(torch::kCPU, {1});
  use_device_mesh();
  use_dtensor(mesh);
  use_policies(mesh);
  use_custom_collectives(mesh);
  use_fully_shard(mesh, arguments[1]);
  use_codecs(mesh);
  use_experts(mesh);
  use_tensor_parallel(mesh);
  use_optim();
  fsdp::destroy_process_group();
  std::cout << "every function\n";
}
