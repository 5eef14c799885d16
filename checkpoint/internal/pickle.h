// Reads Python's pickles without running anything: a class or function is its name, and a
// call is what is called and with what. Who reads matches the few patterns that it knows.
//
//   absl::StatusOr<Pickle> pickle = Pickle::parse(bytes, "model.pt: data.pkl");
//   const Pickled* dict = pickle->root();
//   for (const auto& [key, value] : dict->entries) ...
#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {

struct Pickled {
  enum class Kind {
    kNone,
    kInt,         // and bool: `integer`
    kDouble,      // `number`
    kString,      // and bytes: `text`
    kSequence,    // a tuple or a list: `items`
    kDict,        // `entries`
    kGlobal,      // a class or function: `text` is "module name"
    kCall,        // `items` are what is called and a sequence of arguments; `entries` were set
    kPersistent,  // `items` is the one persistent id
  };
  Kind kind = Kind::kNone;
  int64_t integer = 0;
  double number = 0;
  std::string text = {};
  std::vector<const Pickled*> items = {};
  std::vector<std::pair<const Pickled*, const Pickled*>> entries = {};
  const Pickled* state = nullptr;  // of a call: what the object's attributes become

  bool is(Kind other) const { return kind == other; }
  // Null where this is no dictionary with that string as a key.
  const Pickled* find(std::string_view key) const;
  // Whether this is a call of "module name".
  bool calls(std::string_view name) const;
};

class Pickle {
 public:
  // An error for what is cut off, malformed, or uses an opcode that tensors do not need.
  static absl::StatusOr<Pickle> parse(std::string_view bytes, const std::string& what);
  // Good as long as the pickle, wherever that is moved.
  const Pickled* root() const { return root_; }

 private:
  friend class PickleParser;
  std::deque<Pickled> nodes_;  // all, so that neither depth nor cycles matter
  const Pickled* root_ = nullptr;
};

}  // namespace fsdp::internal::checkpoint
