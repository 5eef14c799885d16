#include "checkpoint/format/pickle/pickle.h"

#include "checkpoint/files/errors.h"

#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <stdexcept>
#include <system_error>
#include <unordered_map>

namespace fsdp::internal::checkpoint {

using Kind = Pickled::Kind;

const Pickled* Pickled::find(std::string_view key) const {
  for (const auto& [name, value] : entries) {
    if (name->is(Kind::kString) && name->text == key) return value;
  }
  return nullptr;
}

std::string_view Pickled::callee() const {
  if (!is(Kind::kCall)) return {};
  const Pickled* called = items[0];
  if (called->is(Kind::kPersistent)) {
    const auto& id = called->items[0]->items;
    if (id.size() >= 2 && id[0]->text == "module") called = id[1];
  }
  return called->is(Kind::kGlobal) ? called->text : std::string_view();
}

bool Pickled::calls(std::string_view name) const { return !name.empty() && callee() == name; }

const Pickled& Pickled::untagged() const {
  const bool is_tagged = callee().starts_with("torch.jit._pickle ") &&
                         items[1]->is(Kind::kSequence) && !items[1]->items.empty();
  return is_tagged ? *items[1]->items[0] : *this;
}

namespace {

using Values = std::vector<const Pickled*>;

// Numbers and texts as opcodes write them: as bytes, or as a line of text in protocol 0.

Pickled pickled_bool(bool value) { return {.kind = Kind::kBool, .integer = value}; }
Pickled pickled_integer(int64_t value) { return {.kind = Kind::kInt, .integer = value}; }
Pickled pickled_text(std::string text) { return {.kind = Kind::kString, .text = std::move(text)}; }

// Two's complement, little-endian, of any length.
Pickled integer_from_bytes(std::string_view bytes) {
  if (bytes.size() > sizeof(int64_t)) return {.kind = Kind::kLong, .text = std::string(bytes)};
  int64_t value = !bytes.empty() && (bytes.back() & 0x80) != 0 ? -1 : 0;
  std::memcpy(&value, bytes.data(), bytes.size());
  return pickled_integer(value);
}

// "12", or "12L" as Python 2 wrote it, "00" and "01" for False and True. Throws
// std::runtime_error for what has anything else in it.
Pickled integer_from_line(std::string line) {
  if (line == "00" || line == "01") return pickled_bool(line == "01");
  if (line.ends_with('L')) line.pop_back();
  int64_t value = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
  if (end != line.data() + line.size()) throw std::runtime_error("an integer is malformed");
  if (error != std::errc()) return {.kind = Kind::kLong, .text = std::move(line)};
  return pickled_integer(value);
}

// Big-endian. REQUIRES: 8 bytes.
Pickled double_from_bytes(std::string_view bytes) {
  char reversed[sizeof(double)];
  for (size_t i = 0; i < sizeof(double); ++i) reversed[i] = bytes[sizeof(double) - 1 - i];
  double value = 0;
  std::memcpy(&value, reversed, sizeof(value));
  return {.kind = Kind::kDouble, .number = value};
}

Pickled double_from_line(const std::string& line) {
  return {.kind = Kind::kDouble, .number = std::strtod(line.c_str(), nullptr)};
}

// As repr() writes it; escapes stay.
Pickled text_from_line(const std::string& line) {
  const bool is_quoted = line.size() >= 2 && line.front() == line.back();
  return pickled_text(is_quoted ? line.substr(1, line.size() - 2) : line);
}

struct CutOffPickle : std::runtime_error {
  CutOffPickle() : std::runtime_error("it is cut off") {}
};

// The bytes of a pickle that are not read yet, and the pieces in which opcodes take them.
// What takes more bytes than there are throws CutOffPickle.
class PickleInput {
 public:
  explicit PickleInput(std::string_view bytes) : rest_(bytes) {}

  // How many bytes are not read yet.
  size_t left() const { return rest_.size(); }

  std::string_view take(uint64_t count) {
    if (count > rest_.size()) throw CutOffPickle();
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

  // What is before the next line break, which is taken too.
  std::string line() {
    const size_t end = rest_.find('\n');
    if (end == std::string_view::npos) throw CutOffPickle();
    const std::string text(take(end));
    take(1);
    return text;
  }

  // The number at the beginning of a line; throws std::runtime_error where there is none.
  size_t line_index() {
    const std::string text = line();
    size_t index = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
    if (error != std::errc()) throw std::runtime_error("a memo has no number");
    return index;
  }

 private:
  std::string_view rest_;
};

// The memory of the machine that a pickle is a program of: the values that it has made, a
// stack of them with marks, and a memo of those that it recalls by number. What needs a
// value or a mark that is not there throws std::runtime_error.
class PickleStack {
 public:
  // A new value that is not on the stack. Throws std::runtime_error for more than 2^24.
  Pickled* make(Pickled&& value) {
    if (values_.size() == kMostValues) throw std::runtime_error("it holds too much");
    return &values_.emplace_back(std::move(value));
  }

  void push(Pickled&& value) { stack_.push_back(make(std::move(value))); }
  void push_mark() { stack_.push_back(nullptr); }
  // The value at the top once more.
  void push_again() { stack_.push_back(top()); }

  Pickled* top() const {
    if (stack_.empty() || stack_.back() == nullptr) throw std::runtime_error("a value is missing");
    return stack_.back();
  }

  Pickled* pop() {
    Pickled* const value = top();
    stack_.pop_back();
    return value;
  }

  // In the order in which they were pushed.
  Values pop_some(size_t count) {
    Values values(count);
    while (count > 0) values[--count] = pop();
    return values;
  }

  // What was pushed since the last mark, which goes too.
  Values pop_to_mark() {
    size_t mark = stack_.size();
    while (mark > 0 && stack_[mark - 1] != nullptr) --mark;
    if (mark == 0) throw std::runtime_error("a mark is missing");
    const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(mark);
    Values values(first, stack_.end());
    stack_.resize(mark - 1);
    return values;
  }

  // Removes a value, or a mark.
  void drop() {
    if (stack_.empty()) throw std::runtime_error("a value is missing");
    stack_.pop_back();
  }

  // Keeps the value at the top under the number of those that are kept already.
  void remember() { keep_top(memo_.size()); }
  void keep_top(size_t index) { memo_[index] = top(); }
  void push_kept(size_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) throw std::runtime_error("a value is recalled that was not kept");
    stack_.push_back(found->second);
  }

  // To be called before a few bytes of the file copy many of what it holds already.
  // Throws std::runtime_error for more than 2^28 bytes in all.
  void count_copied(size_t bytes) {
    copied_bytes_ += bytes;
    if (copied_bytes_ > kMostCopiedBytes) throw std::runtime_error("it holds too much");
  }

  // All values, in the order in which they were made; pointers to them stay good.
  std::deque<Pickled> take_values() { return std::move(values_); }

 private:
  static constexpr size_t kMostValues = size_t{1} << 24;
  static constexpr size_t kMostCopiedBytes = size_t{1} << 28;

  std::deque<Pickled> values_;
  std::vector<Pickled*> stack_;  // null: a mark
  std::unordered_map<size_t, Pickled*> memo_;
  size_t copied_bytes_ = 0;
};

// The machine itself: its opcodes, each a function that takes what stands behind it in
// the input and works on the stack. They build Pickled values and run nothing.
class Machine : private PickleStack {
 public:
  explicit Machine(std::string_view bytes) : input_(bytes) {}

  // Takes opcodes from the input up to the one that ends a pickle; its result is at the
  // top of the stack then. Throws std::runtime_error.
  void run() {
    for (;;) {
      const auto opcode = input_.number<unsigned char>();
      if (opcode == kStop) return;
      const auto found = kOpcodes.find(opcode);
      if (found == kOpcodes.end()) {
        throw std::runtime_error("opcode " + std::to_string(opcode) +
                                 " is of no pickle that holds tensors");
      }
      (this->*found->second)();
    }
  }

  using PickleStack::pop;
  using PickleStack::take_values;
  // How many bytes of the input are not read yet.
  size_t left() const { return input_.left(); }

 private:
  using Opcode = void (Machine::*)();
  static const std::map<unsigned char, Opcode> kOpcodes;
  static constexpr unsigned char kStop = '.';

  template <size_t kBytes>
  void skip() {
    input_.take(kBytes);
  }

  // Numbers and texts.

  template <bool kValue>
  void push_bool() {
    push(pickled_bool(kValue));
  }

  template <class Number>
  void push_integer() {
    push(pickled_integer(input_.number<Number>()));
  }

  template <class Length>
  void push_long_integer() {
    const Length length = input_.number<Length>();
    push(integer_from_bytes(input_.take(length)));
  }

  void push_integer_line() { push(integer_from_line(input_.line())); }
  void push_double() { push(double_from_bytes(input_.take(sizeof(double)))); }
  void push_double_line() { push(double_from_line(input_.line())); }

  template <class Length>
  void push_text() {
    const Length length = input_.number<Length>();
    push(pickled_text(std::string(input_.take(length))));
  }

  void push_text_line() { push(pickled_text(input_.line())); }
  void push_quoted_line() { push(text_from_line(input_.line())); }

  // The stack and the memo.

  void drop_to_mark() { pop_to_mark(); }

  template <class Index>
  void remember_at() {
    keep_top(input_.number<Index>());
  }

  void remember_at_line() { keep_top(input_.line_index()); }

  template <class Index>
  void recall() {
    push_kept(input_.number<Index>());
  }

  void recall_line() { push_kept(input_.line_index()); }

  // Lists, sets and dictionaries.

  template <Kind kKind>
  void push_empty() {
    push({.kind = kKind});
  }

  template <Kind kKind, size_t kCount>
  void push_of_some() {
    push({.kind = kKind, .items = pop_some(kCount)});
  }

  template <Kind kKind>
  void push_of_marked() {
    push({.kind = kKind, .items = pop_to_mark()});
  }

  // To a list or set, or to an object of a class made of a list, whose entries have
  // indices as keys.
  void append_values(const Values& values) {
    Pickled* const list = top();
    const bool is_plain = list->is(Kind::kSequence) || list->is(Kind::kSet);
    if (!is_plain && !list->is(Kind::kCall)) {
      throw std::runtime_error("it appends to what is no list");
    }
    if (is_plain) {
      list->items.insert(list->items.end(), values.begin(), values.end());
      return;
    }
    for (const Pickled* value : values) {
      const auto index = static_cast<int64_t>(list->entries.size());
      list->entries.emplace_back(make(pickled_integer(index)), value);
    }
  }

  void append_one() { append_values(pop_some(1)); }
  void append_marked() { append_values(pop_to_mark()); }

  void set_items(const Values& values) {
    Pickled* const dict = top();
    if (!dict->is(Kind::kDict) && !dict->is(Kind::kCall)) {
      throw std::runtime_error("it sets items of what is no dictionary");
    }
    if (values.size() % 2 != 0) throw std::runtime_error("a key has no value");
    for (size_t i = 0; i < values.size(); i += 2) {
      dict->entries.emplace_back(values[i], values[i + 1]);
    }
  }

  void set_one_item() { set_items(pop_some(2)); }
  void set_marked_items() { set_items(pop_to_mark()); }

  void push_dict_of_marked() {
    const Values values = pop_to_mark();
    push({.kind = Kind::kDict});
    set_items(values);
  }

  // Classes, functions, calls of them, and persistent ids.

  Pickled global_in_lines() {
    const std::string module = input_.line();
    return {.kind = Kind::kGlobal, .text = module + " " + input_.line()};
  }

  void push_global() { push(global_in_lines()); }

  void push_stack_global() {
    const Values names = pop_some(2);
    if (!names[0]->is(Kind::kString) || !names[1]->is(Kind::kString)) {
      throw std::runtime_error("a class without a name");
    }
    count_copied(names[0]->text.size() + names[1]->text.size());
    push({.kind = Kind::kGlobal, .text = names[0]->text + " " + names[1]->text});
  }

  void push_call() {
    Values callee_and_arguments = pop_some(2);
    if (!callee_and_arguments[1]->is(Kind::kSequence)) {
      throw std::runtime_error("a call without arguments");
    }
    push({.kind = Kind::kCall, .items = std::move(callee_and_arguments)});
  }

  void push_new() {
    push_call();
    top()->is_new = true;
  }

  // With a dictionary of named arguments, which become entries.
  void push_new_with_names() {
    const Pickled* const names = pop();
    push_new();
    count_copied(names->entries.size() * sizeof(names->entries[0]));
    top()->entries = names->entries;
  }

  void push_call_of(const Pickled* callee, Values values) {
    const Pickled* const arguments = make({.kind = Kind::kSequence, .items = std::move(values)});
    push({.kind = Kind::kCall, .items = {callee, arguments}});
  }

  // A class and its arguments, all since the mark.
  void push_object() {
    Values values = pop_to_mark();
    if (values.empty()) throw std::runtime_error("a call of nothing");
    const Pickled* const callee = values.front();
    values.erase(values.begin());
    push_call_of(callee, std::move(values));
  }

  // The same where the class's name stands in the opcode.
  void push_instance() {
    const Pickled* const callee = make(global_in_lines());
    push_call_of(callee, pop_to_mark());
  }

  void build() {
    const Pickled* const state = pop();
    top()->state = state;
  }

  void push_persistent_line() {
    const Pickled* const id = make(pickled_text(input_.line()));
    push({.kind = Kind::kPersistent, .items = {id}});
  }

  PickleInput input_;
};

// All of protocols 0 to 5 but those that need a registry or buffers from outside.
const std::map<unsigned char, Machine::Opcode> Machine::kOpcodes = {
    {0x80, &Machine::skip<1>},                            // PROTO
    {0x95, &Machine::skip<sizeof(uint64_t)>},             // FRAME
    {'N', &Machine::push_empty<Kind::kNone>},             // NONE
    {0x88, &Machine::push_bool<true>},                    // NEWTRUE
    {0x89, &Machine::push_bool<false>},                   // NEWFALSE
    {'J', &Machine::push_integer<int32_t>},               // BININT
    {'K', &Machine::push_integer<uint8_t>},               // BININT1
    {'M', &Machine::push_integer<uint16_t>},              // BININT2
    {0x8a, &Machine::push_long_integer<uint8_t>},         // LONG1
    {0x8b, &Machine::push_long_integer<uint32_t>},        // LONG4
    {'I', &Machine::push_integer_line},                   // INT
    {'L', &Machine::push_integer_line},                   // LONG
    {'G', &Machine::push_double},                         // BINFLOAT
    {'F', &Machine::push_double_line},                    // FLOAT
    {'X', &Machine::push_text<uint32_t>},                 // BINUNICODE
    {0x8c, &Machine::push_text<uint8_t>},                 // SHORT_BINUNICODE
    {0x8d, &Machine::push_text<uint64_t>},                // BINUNICODE8
    {'B', &Machine::push_text<uint32_t>},                 // BINBYTES
    {'C', &Machine::push_text<uint8_t>},                  // SHORT_BINBYTES
    {0x8e, &Machine::push_text<uint64_t>},                // BINBYTES8
    {0x96, &Machine::push_text<uint64_t>},                // BYTEARRAY8
    {'T', &Machine::push_text<uint32_t>},                 // BINSTRING
    {'U', &Machine::push_text<uint8_t>},                  // SHORT_BINSTRING
    {'S', &Machine::push_quoted_line},                    // STRING
    {'V', &Machine::push_text_line},                      // UNICODE
    {0x94, &Machine::remember},                           // MEMOIZE
    {'q', &Machine::remember_at<uint8_t>},                // BINPUT
    {'r', &Machine::remember_at<uint32_t>},               // LONG_BINPUT
    {'p', &Machine::remember_at_line},                    // PUT
    {'h', &Machine::recall<uint8_t>},                     // BINGET
    {'j', &Machine::recall<uint32_t>},                    // LONG_BINGET
    {'g', &Machine::recall_line},                         // GET
    {'(', &Machine::push_mark},                           // MARK
    {'0', &Machine::drop},                                // POP
    {'1', &Machine::drop_to_mark},                        // POP_MARK
    {'2', &Machine::push_again},                          // DUP
    {')', &Machine::push_empty<Kind::kSequence>},         // EMPTY_TUPLE
    {']', &Machine::push_empty<Kind::kSequence>},         // EMPTY_LIST
    {0x8f, &Machine::push_empty<Kind::kSet>},             // EMPTY_SET
    {'}', &Machine::push_empty<Kind::kDict>},             // EMPTY_DICT
    {0x85, &Machine::push_of_some<Kind::kSequence, 1>},   // TUPLE1
    {0x86, &Machine::push_of_some<Kind::kSequence, 2>},   // TUPLE2
    {0x87, &Machine::push_of_some<Kind::kSequence, 3>},   // TUPLE3
    {'t', &Machine::push_of_marked<Kind::kSequence>},     // TUPLE
    {'l', &Machine::push_of_marked<Kind::kSequence>},     // LIST
    {0x91, &Machine::push_of_marked<Kind::kSet>},         // FROZENSET
    {'d', &Machine::push_dict_of_marked},                 // DICT
    {'a', &Machine::append_one},                          // APPEND
    {'e', &Machine::append_marked},                       // APPENDS
    {0x90, &Machine::append_marked},                      // ADDITEMS
    {'s', &Machine::set_one_item},                        // SETITEM
    {'u', &Machine::set_marked_items},                    // SETITEMS
    {'c', &Machine::push_global},                         // GLOBAL
    {0x93, &Machine::push_stack_global},                  // STACK_GLOBAL
    {'R', &Machine::push_call},                           // REDUCE
    {0x81, &Machine::push_new},                           // NEWOBJ
    {0x92, &Machine::push_new_with_names},                // NEWOBJ_EX
    {'o', &Machine::push_object},                         // OBJ
    {'i', &Machine::push_instance},                       // INST
    {'b', &Machine::build},                               // BUILD
    {'P', &Machine::push_persistent_line},                // PERSID
    {'Q', &Machine::push_of_some<Kind::kPersistent, 1>},  // BINPERSID
};

}  // namespace

absl::StatusOr<Pickle> Pickle::parse(std::string_view bytes, const std::string& what) {
  try {
    Machine machine(bytes);
    machine.run();
    Pickle pickle;
    pickle.root_ = machine.pop();
    pickle.nodes_ = machine.take_values();
    pickle.bytes_ = bytes.size() - machine.left();
    return pickle;
  } catch (const CutOffPickle& error) {
    return absl::OutOfRangeError(what + ": not a pickle that can be read: " + error.what());
  } catch (const std::exception& error) {
    return absl::DataLossError(what + ": not a pickle that can be read: " + plain_text_of(error));
  }
}

}  // namespace fsdp::internal::checkpoint
