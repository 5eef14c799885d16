#include "checkpoint/internal/pickle.h"

#include <cstring>
#include <map>
#include <stdexcept>
#include <unordered_map>

namespace fsdp::internal::checkpoint {

using Kind = Pickled::Kind;

const Pickled* Pickled::find(std::string_view key) const {
  for (const auto& [name, value] : entries) {
    if (name->is(Kind::kString) && name->text == key) return value;
  }
  return nullptr;
}

bool Pickled::calls(std::string_view name) const {
  return is(Kind::kCall) && items[0]->is(Kind::kGlobal) && items[0]->text == name;
}

// Throws std::runtime_error; Pickle::parse() makes a status of it.
class PickleParser {
 public:
  explicit PickleParser(std::string_view bytes) : rest_(bytes) {}

  Pickle run() {
    for (;;) {
      const auto opcode = static_cast<unsigned char>(take(1)[0]);
      if (opcode == '.') break;
      const auto found = kOpcodes.find(opcode);
      if (found == kOpcodes.end()) {
        throw std::runtime_error("opcode " + std::to_string(opcode) +
                                 " is of no pickle that holds tensors");
      }
      found->second(*this);
    }
    pickle_.root_ = pop();
    return std::move(pickle_);
  }

 private:
  std::string_view take(uint64_t count) {
    if (count > rest_.size()) throw std::runtime_error("it is cut off");
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  // Little-endian.
  template <class Number>
  Number number() {
    Number value = 0;
    std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    return value;
  }
  std::string line() {
    const size_t end = rest_.find('\n');
    if (end == std::string_view::npos) throw std::runtime_error("it is cut off");
    const std::string text(take(end));
    take(1);
    return text;
  }

  Pickled* push(Pickled node) {
    pickle_.nodes_.push_back(std::move(node));
    stack_.push_back(&pickle_.nodes_.back());
    return stack_.back();
  }
  void push_int(int64_t value) { push({.kind = Kind::kInt, .integer = value}); }
  void push_text(uint64_t length) {
    push({.kind = Kind::kString, .text = std::string(take(length))});
  }
  Pickled* top() {
    if (stack_.empty() || stack_.back() == nullptr) throw std::runtime_error("a value is missing");
    return stack_.back();
  }
  Pickled* pop() {
    Pickled* const value = top();
    stack_.pop_back();
    return value;
  }
  // What was pushed since the last mark, which goes too.
  std::vector<const Pickled*> pop_to_mark() {
    size_t mark = stack_.size();
    while (mark > 0 && stack_[mark - 1] != nullptr) --mark;
    if (mark == 0) throw std::runtime_error("a mark is missing");
    const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(mark);
    std::vector<const Pickled*> values(first, stack_.end());
    stack_.resize(mark - 1);
    return values;
  }
  std::vector<const Pickled*> pop_some(size_t count) {
    std::vector<const Pickled*> values(count);
    while (count > 0) values[--count] = pop();
    return values;
  }

  void push_long() {
    const auto bytes = take(number<uint8_t>());
    if (bytes.size() > sizeof(int64_t)) throw std::runtime_error("an integer is too long");
    int64_t value = !bytes.empty() && (bytes.back() & 0x80) != 0 ? -1 : 0;
    std::memcpy(&value, bytes.data(), bytes.size());
    push_int(value);
  }
  void push_double() {
    const auto bytes = take(sizeof(double));
    char reversed[sizeof(double)];
    for (size_t i = 0; i < sizeof(double); ++i) reversed[i] = bytes[sizeof(double) - 1 - i];
    double value = 0;
    std::memcpy(&value, reversed, sizeof(value));
    push({.kind = Kind::kDouble, .number = value});
  }

  void remember(size_t index) { memo_[index] = top(); }
  void recall(size_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) throw std::runtime_error("a value is recalled that was not kept");
    stack_.push_back(found->second);
  }

  void push_sequence(std::vector<const Pickled*> items) {
    push({.kind = Kind::kSequence, .items = std::move(items)});
  }
  void append(const std::vector<const Pickled*>& values) {
    Pickled* const list = top();
    if (!list->is(Kind::kSequence)) throw std::runtime_error("it appends to what is no list");
    list->items.insert(list->items.end(), values.begin(), values.end());
  }
  void set_items(const std::vector<const Pickled*>& values) {
    Pickled* const dict = top();
    if (!dict->is(Kind::kDict) && !dict->is(Kind::kCall)) {
      throw std::runtime_error("it sets items of what is no dictionary");
    }
    if (values.size() % 2 != 0) throw std::runtime_error("a key has no value");
    for (size_t i = 0; i < values.size(); i += 2) {
      dict->entries.emplace_back(values[i], values[i + 1]);
    }
  }

  void push_global() {
    const std::string module = line();
    push({.kind = Kind::kGlobal, .text = module + " " + line()});
  }
  void push_stack_global() {
    const auto names = pop_some(2);
    if (!names[0]->is(Kind::kString) || !names[1]->is(Kind::kString)) {
      throw std::runtime_error("a class without a name");
    }
    push({.kind = Kind::kGlobal, .text = names[0]->text + " " + names[1]->text});
  }
  void push_call() {
    auto callee_and_arguments = pop_some(2);
    if (!callee_and_arguments[1]->is(Kind::kSequence)) {
      throw std::runtime_error("a call without arguments");
    }
    push({.kind = Kind::kCall, .items = std::move(callee_and_arguments)});
  }
  void build() {
    const Pickled* const state = pop();
    top()->state = state;
  }

  static const std::map<unsigned char, void (*)(PickleParser&)> kOpcodes;

  std::string_view rest_;
  Pickle pickle_;
  std::vector<Pickled*> stack_;  // null: a mark
  std::unordered_map<size_t, Pickled*> memo_;
};

const std::map<unsigned char, void (*)(PickleParser&)> PickleParser::kOpcodes = {
    {0x80, [](PickleParser& p) { p.take(1); }},                          // PROTO
    {0x95, [](PickleParser& p) { p.take(sizeof(uint64_t)); }},           // FRAME
    {'N', [](PickleParser& p) { p.push({}); }},                          // NONE
    {0x88, [](PickleParser& p) { p.push_int(1); }},                      // NEWTRUE
    {0x89, [](PickleParser& p) { p.push_int(0); }},                      // NEWFALSE
    {'J', [](PickleParser& p) { p.push_int(p.number<int32_t>()); }},     // BININT
    {'K', [](PickleParser& p) { p.push_int(p.number<uint8_t>()); }},     // BININT1
    {'M', [](PickleParser& p) { p.push_int(p.number<uint16_t>()); }},    // BININT2
    {0x8a, [](PickleParser& p) { p.push_long(); }},                      // LONG1
    {'G', [](PickleParser& p) { p.push_double(); }},                     // BINFLOAT
    {'X', [](PickleParser& p) { p.push_text(p.number<uint32_t>()); }},   // BINUNICODE
    {0x8c, [](PickleParser& p) { p.push_text(p.number<uint8_t>()); }},   // SHORT_BINUNICODE
    {0x8d, [](PickleParser& p) { p.push_text(p.number<uint64_t>()); }},  // BINUNICODE8
    {'B', [](PickleParser& p) { p.push_text(p.number<uint32_t>()); }},   // BINBYTES
    {'C', [](PickleParser& p) { p.push_text(p.number<uint8_t>()); }},    // SHORT_BINBYTES
    {0x94, [](PickleParser& p) { p.remember(p.memo_.size()); }},         // MEMOIZE
    {'q', [](PickleParser& p) { p.remember(p.number<uint8_t>()); }},     // BINPUT
    {'r', [](PickleParser& p) { p.remember(p.number<uint32_t>()); }},    // LONG_BINPUT
    {'h', [](PickleParser& p) { p.recall(p.number<uint8_t>()); }},       // BINGET
    {'j', [](PickleParser& p) { p.recall(p.number<uint32_t>()); }},      // LONG_BINGET
    {'(', [](PickleParser& p) { p.stack_.push_back(nullptr); }},         // MARK
    {')', [](PickleParser& p) { p.push_sequence({}); }},                 // EMPTY_TUPLE
    {']', [](PickleParser& p) { p.push_sequence({}); }},                 // EMPTY_LIST
    {'}', [](PickleParser& p) { p.push({.kind = Kind::kDict}); }},       // EMPTY_DICT
    {0x85, [](PickleParser& p) { p.push_sequence(p.pop_some(1)); }},     // TUPLE1
    {0x86, [](PickleParser& p) { p.push_sequence(p.pop_some(2)); }},     // TUPLE2
    {0x87, [](PickleParser& p) { p.push_sequence(p.pop_some(3)); }},     // TUPLE3
    {'t', [](PickleParser& p) { p.push_sequence(p.pop_to_mark()); }},    // TUPLE
    {'a', [](PickleParser& p) { p.append(p.pop_some(1)); }},             // APPEND
    {'e', [](PickleParser& p) { p.append(p.pop_to_mark()); }},           // APPENDS
    {'s', [](PickleParser& p) { p.set_items(p.pop_some(2)); }},          // SETITEM
    {'u', [](PickleParser& p) { p.set_items(p.pop_to_mark()); }},        // SETITEMS
    {'c', [](PickleParser& p) { p.push_global(); }},                     // GLOBAL
    {0x93, [](PickleParser& p) { p.push_stack_global(); }},              // STACK_GLOBAL
    {'R', [](PickleParser& p) { p.push_call(); }},                       // REDUCE
    {0x81, [](PickleParser& p) { p.push_call(); }},                      // NEWOBJ
    {'b', [](PickleParser& p) { p.build(); }},                           // BUILD
    {'Q', [](PickleParser&
                 p) { p.push({.kind = Kind::kPersistent, .items = p.pop_some(1)}); }},  // BINPERSID
};

absl::StatusOr<Pickle> Pickle::parse(std::string_view bytes, const std::string& what) {
  try {
    return PickleParser(bytes).run();
  } catch (const std::runtime_error& error) {
    return absl::DataLossError(what + ": not a pickle that can be read: " + error.what());
  }
}

}  // namespace fsdp::internal::checkpoint
