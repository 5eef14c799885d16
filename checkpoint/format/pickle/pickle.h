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
    kBool,        // `integer` is 0 or 1
    kInt,         // `integer`
    kLong,        // beyond 64 bits: `text` is little-endian, in two's complement, or its digits
    kDouble,      // `number`
    kString,      // and bytes: `text`
    kSequence,    // a tuple or list: `items`
    kSet,         // `items`, in the order in which the file has them
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
  bool is_new = false;             // of a call: of a class's __new__, not of a function

  bool is(Kind other) const { return kind == other; }
  // Null where this is no dictionary with that string as a key.
  const Pickled* find(std::string_view key) const;
  // Whether this is a call of "module name".
  bool calls(std::string_view name) const;
  // What TorchScript's pickler wrote with its type, restore_type_tag(value, "Dict[...]"),
  // or as a list of one type; else this.
  const Pickled& untagged() const;
  // "module name" of what is called; empty where this is no call of something with a
  // name. A class that torch.save kept with its source, ("module", class, file, source),
  // is it.
  std::string_view callee() const;
};

class Pickle {
 public:
  // The pickle at the beginning of `bytes`. An error for what is malformed, uses an
  // opcode that Python's pickles of tensors never have, or holds more than 2^24 values or
  // copies of more than 2^28 bytes of them; kOutOfRange for what is cut off.
  static absl::StatusOr<Pickle> parse(std::string_view bytes, const std::string& what);
  // Good as long as the pickle, wherever that is moved.
  const Pickled* root() const { return root_; }
  // Everything in it, in the order in which it was read.
  const std::deque<Pickled>& nodes() const { return nodes_; }
  // How many bytes it took.
  size_t bytes() const { return bytes_; }

 private:
  std::deque<Pickled> nodes_;  // all, so that neither depth nor cycles matter
  const Pickled* root_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace fsdp::internal::checkpoint
