// The names that a file has for what a model calls otherwise, such as those of a folder
// from Hugging Face, as pairs of patterns. It is a function for name_in_file, so one
// table serves load, save and convert; turned round it also serves plans.
//
//   const fsdp::NameMap names = {{"embedding", "model.embed_tokens"},
//                                {"block*", "model.layers.*"},
//                                {"block*.mlp.up", "model.layers.*.mlp.up_proj"},
//                                {"head", "lm_head"}};
//   names("block3.mlp.up.weight");  // "model.layers.3.mlp.up_proj.weight"
//   fsdp::load({.model = model}, path, {.name_in_file = names});
//
//   const auto own_names = names.reversed();
//   for (auto& [path, style] : plan) path = own_names(path);  // a plan with a file's names
#pragma once

#include "device_mesh/api.h"

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace fsdp {

class NameMap {
 public:
  // The model's pattern and the file's. Both mean a dotted path, of a module with all
  // that is below it, or of one parameter; "" is the whole model. A '*' stands for any
  // part of one name, as in ParallelPlan, and is the same part on the other side: both
  // have as many, in one order. Later entries win.
  using Entry = std::pair<std::string, std::string>;
  // Throws ValueError, naming the entry, where its sides have not as many '*'.
  FSDP_API NameMap(std::initializer_list<Entry> entries);
  FSDP_API explicit NameMap(std::vector<Entry> entries);

  // The file's name, or pattern, for one of the model's; the same where no entry means
  // it.
  FSDP_API std::string operator()(const std::string& name) const;
  // From the file's names to the model's.
  FSDP_API NameMap reversed() const;

  // Throws ValueError that lists the entries that mean no name of the model, names that
  // become one, and names that reversed() does not give back. (What only the model or
  // only the file has, load() lists.) `names` are those of named_parameters() and
  // named_buffers(). Local.
  FSDP_API void check(const std::vector<std::string>& names) const;

 private:
  std::vector<Entry> entries_;
};

}  // namespace fsdp
