#include "checkpoint/format/pickle/pickle.h"

#include "checkpoint/files/plain_text.h"
#include "checkpoint/format/pickle/pickle_input.h"
#include "checkpoint/format/pickle/pickle_opcodes.h"
#include "checkpoint/format/pickle/pickle_stack.h"

#include <exception>

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

absl::StatusOr<Pickle> Pickle::parse(std::string_view bytes, const std::string& what) {
  try {
    PickleInput input(bytes);
    PickleStack stack;
    run_opcodes(input, stack);
    Pickle pickle;
    pickle.root_ = stack.pop();
    pickle.nodes_ = stack.take_values();
    pickle.bytes_ = bytes.size() - input.left();
    return pickle;
  } catch (const CutOffPickle& error) {
    return absl::OutOfRangeError(what + ": not a pickle that can be read: " + error.what());
  } catch (const std::exception& error) {
    return absl::DataLossError(what + ": not a pickle that can be read: " + plain_text_of(error));
  }
}

}  // namespace fsdp::internal::checkpoint
