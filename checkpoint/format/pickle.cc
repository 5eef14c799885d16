#include "checkpoint/format/pickle.h"

#include "checkpoint/files/plain_text.h"
#include "checkpoint/format/pickle_parser.h"

#include <exception>
#include <map>

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

// All of protocols 0 to 5 but those that need a registry or buffers from outside.
const std::map<unsigned char, void (*)(PickleParser&)> PickleParser::kOpcodes = {
    {0x80, [](PickleParser& p) { p.take(1); }},                          // PROTO
    {0x95, [](PickleParser& p) { p.take(sizeof(uint64_t)); }},           // FRAME
    {'N', [](PickleParser& p) { p.push({}); }},                          // NONE
    {0x88, [](PickleParser& p) { p.push_bool(true); }},                  // NEWTRUE
    {0x89, [](PickleParser& p) { p.push_bool(false); }},                 // NEWFALSE
    {'J', [](PickleParser& p) { p.push_int(p.number<int32_t>()); }},     // BININT
    {'K', [](PickleParser& p) { p.push_int(p.number<uint8_t>()); }},     // BININT1
    {'M', [](PickleParser& p) { p.push_int(p.number<uint16_t>()); }},    // BININT2
    {0x8a, [](PickleParser& p) { p.push_long(p.number<uint8_t>()); }},   // LONG1
    {0x8b, [](PickleParser& p) { p.push_long(p.number<uint32_t>()); }},  // LONG4
    {'I', [](PickleParser& p) { p.push_digits(); }},                     // INT
    {'L', [](PickleParser& p) { p.push_digits(); }},                     // LONG
    {'G', [](PickleParser& p) { p.push_double(); }},                     // BINFLOAT
    {'F', [](PickleParser& p) { p.push_decimal(); }},                    // FLOAT
    {'X', [](PickleParser& p) { p.push_text(p.number<uint32_t>()); }},   // BINUNICODE
    {0x8c, [](PickleParser& p) { p.push_text(p.number<uint8_t>()); }},   // SHORT_BINUNICODE
    {0x8d, [](PickleParser& p) { p.push_text(p.number<uint64_t>()); }},  // BINUNICODE8
    {'B', [](PickleParser& p) { p.push_text(p.number<uint32_t>()); }},   // BINBYTES
    {'C', [](PickleParser& p) { p.push_text(p.number<uint8_t>()); }},    // SHORT_BINBYTES
    {0x8e, [](PickleParser& p) { p.push_text(p.number<uint64_t>()); }},  // BINBYTES8
    {0x96, [](PickleParser& p) { p.push_text(p.number<uint64_t>()); }},  // BYTEARRAY8
    {'T', [](PickleParser& p) { p.push_text(p.number<uint32_t>()); }},   // BINSTRING
    {'U', [](PickleParser& p) { p.push_text(p.number<uint8_t>()); }},    // SHORT_BINSTRING
    {'S', [](PickleParser& p) { p.push_quoted(); }},                     // STRING
    {'V', [](PickleParser& p) { p.push({.kind = Kind::kString, .text = p.line()}); }},  // UNICODE
    {0x94, [](PickleParser& p) { p.remember(p.memo_.size()); }},                        // MEMOIZE
    {'q', [](PickleParser& p) { p.remember(p.number<uint8_t>()); }},                    // BINPUT
    {'r', [](PickleParser& p) { p.remember(p.number<uint32_t>()); }},  // LONG_BINPUT
    {'p', [](PickleParser& p) { p.remember(p.line_index()); }},        // PUT
    {'h', [](PickleParser& p) { p.recall(p.number<uint8_t>()); }},     // BINGET
    {'j', [](PickleParser& p) { p.recall(p.number<uint32_t>()); }},    // LONG_BINGET
    {'g', [](PickleParser& p) { p.recall(p.line_index()); }},          // GET
    {'(', [](PickleParser& p) { p.stack_.push_back(nullptr); }},       // MARK
    {'0', [](PickleParser& p) { p.drop(); }},                          // POP
    {'1', [](PickleParser& p) { p.pop_to_mark(); }},                   // POP_MARK
    {'2', [](PickleParser& p) { p.push_again(); }},                    // DUP
    {')', [](PickleParser& p) { p.push_sequence({}); }},               // EMPTY_TUPLE
    {']', [](PickleParser& p) { p.push_sequence({}); }},               // EMPTY_LIST
    {0x8f, [](PickleParser& p) { p.push_set({}); }},                   // EMPTY_SET
    {'}', [](PickleParser& p) { p.push({.kind = Kind::kDict}); }},     // EMPTY_DICT
    {0x85, [](PickleParser& p) { p.push_sequence(p.pop_some(1)); }},   // TUPLE1
    {0x86, [](PickleParser& p) { p.push_sequence(p.pop_some(2)); }},   // TUPLE2
    {0x87, [](PickleParser& p) { p.push_sequence(p.pop_some(3)); }},   // TUPLE3
    {'t', [](PickleParser& p) { p.push_sequence(p.pop_to_mark()); }},  // TUPLE
    {'l', [](PickleParser& p) { p.push_sequence(p.pop_to_mark()); }},  // LIST
    {0x91, [](PickleParser& p) { p.push_set(p.pop_to_mark()); }},      // FROZENSET
    {'d', [](PickleParser& p) { p.push_dict(p.pop_to_mark()); }},      // DICT
    {'a', [](PickleParser& p) { p.append(p.pop_some(1)); }},           // APPEND
    {'e', [](PickleParser& p) { p.append(p.pop_to_mark()); }},         // APPENDS
    {0x90, [](PickleParser& p) { p.append(p.pop_to_mark()); }},        // ADDITEMS
    {'s', [](PickleParser& p) { p.set_items(p.pop_some(2)); }},        // SETITEM
    {'u', [](PickleParser& p) { p.set_items(p.pop_to_mark()); }},      // SETITEMS
    {'c', [](PickleParser& p) { p.push_global(); }},                   // GLOBAL
    {0x93, [](PickleParser& p) { p.push_stack_global(); }},            // STACK_GLOBAL
    {'R', [](PickleParser& p) { p.push_call(); }},                     // REDUCE
    {0x81, [](PickleParser& p) { p.push_new(); }},                     // NEWOBJ
    {0x92, [](PickleParser& p) { p.push_call_with_names(); }},         // NEWOBJ_EX
    {'o', [](PickleParser& p) { p.push_object(); }},                   // OBJ
    {'i', [](PickleParser& p) { p.push_instance(); }},                 // INST
    {'b', [](PickleParser& p) { p.build(); }},                         // BUILD
    {'P', [](PickleParser& p) { p.push_persistent_line(); }},          // PERSID
    {'Q', [](PickleParser&
                 p) { p.push({.kind = Kind::kPersistent, .items = p.pop_some(1)}); }},  // BINPERSID
};

absl::StatusOr<Pickle> Pickle::parse(std::string_view bytes, const std::string& what) {
  try {
    return PickleParser(bytes).run();
  } catch (const CutOffPickle& error) {
    return absl::OutOfRangeError(what + ": not a pickle that can be read: " + error.what());
  } catch (const std::exception& error) {
    return absl::DataLossError(what + ": not a pickle that can be read: " + plain_text_of(error));
  }
}

}  // namespace fsdp::internal::checkpoint
