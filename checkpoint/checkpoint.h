// Checkpoints: a folder of safetensors files and a manifest that appears by one rename,
// loads at any world size, mesh and placement, and is read by Python as it is.
//
//   fsdp::save({.model = model, .optimizer = optimizer, .values = {{"step", step}}},
//              "runs/step-1000", {.step = 1000, .keep_last = 3});
//   ...
//   if (auto path = fsdp::latest_checkpoint("runs")) {
//     auto loaded = fsdp::load({.model = model, .optimizer = optimizer}, *path);
//     step = loaded.values.at("step").toInt();
//   }
//
// save() and load() are collective over the default process group (or local where there
// is none), and every rank gives the same names, path and options; the path is on a file
// system that all ranks see. What one rank finds wrong, all ranks throw: ValueError for
// arguments and for what does not fit the model, c10::Error for files, with the rank, the
// parameter or the file. A save that fails or dies leaves what was there before; a load
// that fails before it says "partly overwritten" has changed nothing.
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/module_ref.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
class LRScheduler;
}  // namespace torch::optim

namespace fsdp {

// Optimizers and schedulers as what is saved and loaded, made from the objects
// themselves, so that this header needs no heavy one. Neither owns; the object outlives
// the call it is given to. Null by default.
class OptimizerRef {
 public:
  OptimizerRef() = default;
  OptimizerRef(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}
  template <class Derived>
  OptimizerRef(const std::unique_ptr<Derived>& optimizer) : optimizer_(optimizer.get()) {}
  template <class Derived>
  OptimizerRef(const std::shared_ptr<Derived>& optimizer) : optimizer_(optimizer.get()) {}
  // What a temporary owns is gone before it is saved.
  template <class Derived>
  OptimizerRef(std::unique_ptr<Derived>&& optimizer) = delete;
  template <class Derived>
  OptimizerRef(std::shared_ptr<Derived>&& optimizer) = delete;

  torch::optim::Optimizer* get() const { return optimizer_; }

 private:
  torch::optim::Optimizer* optimizer_ = nullptr;
};

class SchedulerRef {
 public:
  SchedulerRef() = default;
  SchedulerRef(torch::optim::LRScheduler& scheduler) : scheduler_(&scheduler) {}

  torch::optim::LRScheduler* get() const { return scheduler_; }

 private:
  torch::optim::LRScheduler* scheduler_ = nullptr;
};

// What is saved, and what load fills.
struct State {
  ModuleRef model = {};  // parameters and buffers, by name
  OptimizerRef optimizer = {};
  SchedulerRef scheduler = {};
  // Several: the optimizer of a key names its parameters by the model of that key, or
  // else by `model`.
  std::map<std::string, ModuleRef> models = {};
  std::map<std::string, OptimizerRef> optimizers = {};
  std::map<std::string, at::Tensor> tensors = {};  // any placement, or plain: the same on all ranks
  // Numbers, strings, lists and dictionaries of them; rank 0's are kept.
  std::map<std::string, c10::IValue> values = {};
  // Each rank its own; may hold tensors. Loads at the same world size only.
  std::map<std::string, c10::IValue> per_rank = {};
  // This rank's CPU and CUDA generators, manual_seed's included, per rank as well. Ranks
  // that are threads need manual_seed for it.
  bool rng = false;
};

enum class Layout {
  kSharded,  // each rank writes what it holds; nothing is sent
  kFull,     // whole tensors, as Hugging Face's readers want them; gathered unit by unit
};

struct SaveOptions {
  Layout layout = Layout::kSharded;
  bool overwrite = false;  // else an existing path throws
  int64_t step = -1;       // latest_checkpoint() orders by it; -1: by time alone
  int64_t keep_last = 0;   // committed checkpoints kept in the folder of `path`; 0: all
  std::optional<c10::ScalarType> model_dtype = {};  // kFull: floating tensors of models become this
  int64_t max_file_bytes = 5'000'000'000;           // kFull
  // The name in the file of a name of a model or of State::tensors, such as the one that
  // Hugging Face has for it; null: the same. The optimizers' state goes by it, too. Every
  // rank gives the same names. Throws where two tensors get one name; the names of one
  // tensor may become one. LoadOptions::name_in_file, the same function, reads them back.
  std::function<std::string(const std::string&)> name_in_file = {};
};

struct LoadOptions {
  bool strict = true;          // names missing in the file or unknown to the model throw
  bool verify = true;          // checksums of what is read
  bool cast = false;           // allow conversions of dtype that lose something
  bool skip_per_rank = false;  // leave per-rank items of another world size alone
  // The name in the file of a name of a model or of State::tensors; null: the same. The
  // optimizers' state goes by it, too.
  std::function<std::string(const std::string&)> name_in_file = {};
  // Patterns (as NameMap's) of names of the model that stay as they are, whatever the
  // file has for them: "head" for a new one. A pattern that matches no name throws.
  std::vector<std::string> leave = {};
  // For a parameter that has more rows (indices of its first dimension) here than in the
  // file, such as the table of an enlarged vocabulary. The file's rows are loaded, and
  // this function is called for the new rows of each rank: `rows` is a view of them,
  // `first` the place of the first one. Several times where a rank's part is in pieces,
  // and on some ranks never: it must not be collective. Null: load throws.
  std::function<void(const std::string& name, int64_t first, at::Tensor rows)> init_new_rows = {};
};

struct LoadResult {
  std::vector<std::string> missing;     // left as they were
  std::vector<std::string> unexpected;  // in the file, and of nothing here
  // Per-rank items of another world size, and what a file of others holds that is no
  // tensor or cannot be read: sparse tensors, objects, variants of files.
  std::vector<std::string> skipped;
  std::map<std::string, c10::IValue> values = {};
  std::map<std::string, c10::IValue> per_rank = {};
  int64_t step = -1;
};

FSDP_API void save(const State& state, const std::string& path, SaveOptions options = {});

// `path`: what save() made, or what others did: a file of safetensors, of Python's or
// LibTorch's torch.save or of TorchScript, a folder or index of such files, or a folder
// of torch.distributed.checkpoint. What does not fit the model is named, all of it. A
// tensor that is not read, such as a sparse one, throws by name under `strict`; else a
// warning names it. State::optimizer, without a model, also loads from a file of
// torch::save(optimizer).
FSDP_API LoadResult load(const State& state, const std::string& path, LoadOptions options = {});

// The newest whole checkpoint in `directory`, by step, then by time; what an interrupted
// save left does not count. Local.
[[nodiscard]] FSDP_API std::optional<std::string> latest_checkpoint(const std::string& directory);

// Reads every byte. Throws c10::Error that names the file and the MiB. Local.
FSDP_API void verify_checkpoint(const std::string& path);

}  // namespace fsdp
