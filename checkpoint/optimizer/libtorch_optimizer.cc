#include "checkpoint/optimizer/libtorch_optimizer.h"

#include "checkpoint/format/catalog/foreign_files.h"
#include "checkpoint/format/pickle/pickle.h"
#include "checkpoint/format/torch_file/torch_file.h"
#include "checkpoint/optimizer/optimizer_fields.h"

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <exception>
#include <optional>
#include <set>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

using Kind = Pickled::Kind;

constexpr const char* kState = "state";
constexpr const char* kGroups = "param_groups";
// Fields of LibTorch's own optimizers that have the shape of their parameter.
constexpr std::array<const char*, 7> kLikeParameter = {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg"};

// A number, a text or None; nullopt for anything else.
std::optional<Json> scalar_json(const Pickled& value) {
  switch (value.kind) {
    case Kind::kNone:
      return Json(nullptr);
    case Kind::kBool:
      return Json(value.integer != 0);
    case Kind::kInt:
      return Json(value.integer);
    case Kind::kDouble:
      return Json(value.number);
    case Kind::kString:
      return Json(value.text);
    default:
      return std::nullopt;
  }
}

// One of those, or a list of them. Not of lists: what a file holds may hold itself.
std::optional<Json> json_of(const Pickled& tagged) {
  const Pickled& value = tagged.untagged();
  if (!value.is(Kind::kSequence)) return scalar_json(value);
  Json list = Json::array();
  for (const Pickled* item : value.items) {
    auto each = scalar_json(*item);
    if (!each) return std::nullopt;
    list.push_back(*std::move(each));
  }
  return list;
}

struct NotFitting : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require_fit(bool condition, const std::string& what) {
  if (!condition) throw NotFitting(what);
}

class OptimizerArchive {
 public:
  OptimizerArchive(Catalog catalog, const torch::optim::Optimizer& optimizer)
      : stored_(std::move(catalog)), optimizer_(optimizer) {
    read_.catalog.files = stored_.files;
    read_.details = {{"scalars", Json::array()},
                     {"lists", Json::object()},
                     {"groups", Json::array()},
                     {"values", Json::object()}};
  }

  // Throws NotFitting.
  LibTorchOptimizer run(const Pickled& root) {
    const Pickled* const groups = attribute(root, kGroups);
    const Pickled* const state = attribute(root, kState);
    if (groups == nullptr || state == nullptr) throw std::runtime_error("no optimizer's");
    state_ = attributes(*state);
    const auto& mine = optimizer_.param_groups();
    for (size_t i = 0; i < mine.size(); ++i) {
      const Pickled* const group =
          attribute(*groups, std::string(kGroups) + "/" + std::to_string(i));
      require_fit(group != nullptr, "it has " + std::to_string(i) +
                                        " groups of parameters, and this " + "optimizer " +
                                        std::to_string(mine.size()));
      add_group(i, *group);
    }
    require_fit(
        attribute(*groups, std::string(kGroups) + "/" + std::to_string(mine.size())) == nullptr,
        "it has more than " + std::to_string(mine.size()) + " groups of parameters");
    return std::move(read_);
  }

 private:
  static const Pickled* attribute(const Pickled& object, const std::string& name) {
    return object.state == nullptr ? nullptr : object.state->find(name);
  }

  using Attributes = std::unordered_map<std::string, const Pickled*>;
  static Attributes attributes(const Pickled& object) {
    Attributes found;
    if (object.state == nullptr) return found;
    for (const auto& [name, value] : object.state->entries) found.emplace(name->text, value);
    return found;
  }

  void add_group(size_t index, const Pickled& group) {
    const auto& mine = optimizer_.param_groups()[index];
    const std::string place = "group " + std::to_string(index);
    const Attributes theirs = attributes(group);
    Json params = Json::array();
    for (size_t i = 0; i < mine.params().size(); ++i) {
      const auto key = theirs.find("params/" + std::to_string(i));
      require_fit(key != theirs.end(), place + " has " + std::to_string(i) + " parameters, and " +
                                           std::to_string(mine.params().size()) +
                                           " in this optimizer");
      const std::string name = "groups." + std::to_string(index) + "." + std::to_string(i);
      const void* const handle = mine.params()[i].unsafeGetTensorImpl();
      const auto [known, is_new] = names_.emplace(handle, name);
      params.push_back(known->second);
      if (!is_new) continue;  // a tied parameter, listed twice
      read_.parameters.tensors.push_back({name, mine.params()[i]});
      const auto fields = state_.find(key->second->text);
      if (fields != state_.end()) {
        add_state(name, fields->first, *fields->second, mine.params()[i]);
      }
    }
    require_fit(theirs.count("params/" + std::to_string(mine.params().size())) == 0,
                place + " has more than " + std::to_string(mine.params().size()) + " parameters");
    read_.details["groups"].push_back(
        {{"params", std::move(params)}, {"options", options_of(group, mine.options(), place)}});
  }

  Json options_of(const Pickled& group, const torch::optim::OptimizerOptions& mine,
                  const std::string& place) const {
    const Pickled* const options = attribute(group, "options");
    Json json = Json::object();
    std::set<std::string> theirs, ours;
    if (options != nullptr && options->state != nullptr) {
      for (const auto& [name, value] : options->state->entries) {
        const auto each = json_of(*value);
        if (!each) continue;
        json[name->text] = *each;
        theirs.insert(name->text);
      }
    }
    for (const auto& [name, value] : fields_of(mine)) ours.insert(name);
    for (const auto& name : ours) {
      require_fit(theirs.count(name) != 0, "it is of an optimizer of another class: " + place +
                                               " has no option '" + name + "'");
    }
    return json;
  }

  void add_state(const std::string& name, const std::string& key, const Pickled& fields,
                 const at::Tensor& parameter) {
    if (fields.state == nullptr) return;
    for (const auto& [field, tagged] : fields.state->entries) {
      const std::string to = std::string(kState) + "." + name + "." + field->text;
      const std::string from = std::string(kState) + "." + key + "." + field->text;
      const Pickled& value = tagged->untagged();
      if (add_tensor(from, to)) {
        check_shape(field->text, to, parameter);
      } else if (value.is(Kind::kSequence)) {
        size_t count = 0;
        while (add_tensor(from + "." + std::to_string(count), to + "." + std::to_string(count)))
          ++count;
        if (count == value.items.size()) read_.details["lists"][to] = count;
      } else if (is_scalar(value)) {
        read_.details["values"][to] = *json_of(value);
      }
    }
  }

  static bool is_scalar(const Pickled& value) {
    return value.is(Kind::kBool) || value.is(Kind::kInt) || value.is(Kind::kDouble);
  }

  bool add_tensor(const std::string& from, const std::string& to) {
    const auto found = stored_.tensors.find(from);
    if (found == stored_.tensors.end()) return false;
    read_.catalog.tensors.emplace(to, found->second);
    return true;
  }

  void check_shape(const std::string& field, const std::string& name,
                   const at::Tensor& parameter) const {
    bool is_like_parameter = false;
    for (const char* each : kLikeParameter) is_like_parameter |= field == each;
    if (!is_like_parameter) return;
    const auto& shape = read_.catalog.tensors.at(name).shape;
    require_fit(parameter.sizes() == c10::IntArrayRef(shape),
                c10::str("'", name, "' has shape ", c10::IntArrayRef(shape),
                         " in the file, and its ", "parameter ", parameter.sizes(), " here"));
  }

  Catalog stored_;
  Attributes state_;                                    // by key of a parameter
  std::unordered_map<const void*, std::string> names_;  // of parameters
  const torch::optim::Optimizer& optimizer_;
  LibTorchOptimizer read_;
};

}  // namespace

absl::StatusOr<LibTorchOptimizer> read_libtorch_optimizer(
    const std::string& path, const torch::optim::Optimizer& optimizer) {
  auto catalog = catalog_of_files(path);
  if (!catalog.ok()) return catalog.status();
  const auto pickle = pickle_of_archive(path);
  try {
    if (!pickle.ok()) throw std::runtime_error("no archive");
    return OptimizerArchive(*std::move(catalog), optimizer).run(*pickle->root());
  } catch (const NotFitting& error) {
    return absl::InvalidArgumentError(path + ": it does not fit the optimizer: " + error.what());
  } catch (const std::exception&) {
    return absl::InvalidArgumentError(
        path + ": an optimizer is loaded from what save() made, or from a file of LibTorch's " +
        "torch::save(optimizer): no other format has its options");
  }
}

}  // namespace fsdp::internal::checkpoint
