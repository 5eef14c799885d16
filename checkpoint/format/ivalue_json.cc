#include "checkpoint/format/ivalue_json.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {
namespace {

// JSON has no NaN and no infinities; and an object that stands for something else than a
// dictionary has just one of these keys.
constexpr const char* kDouble = "double";
constexpr const char* kDict = "dict";
constexpr const char* kTensor = "tensor";

Json from_double(double value) {
  if (std::isnan(value)) return {{kDouble, "nan"}};
  if (std::isinf(value)) return {{kDouble, value > 0 ? "inf" : "-inf"}};
  return value;
}

double special_double(const std::string& text) {
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  return text == "inf" ? infinity : -infinity;
}

template <class Elements>
Json from_elements(const Elements& elements, const std::string& name, TensorsByName* tensors) {
  Json list = Json::array();
  for (const c10::IValue& element : elements) {
    list.push_back(to_json(element, name + "." + std::to_string(list.size()), tensors));
  }
  return list;
}

Json from_dict(const c10::IValue& value, const std::string& name, TensorsByName* tensors) {
  Json dict = Json::object();
  for (const auto& item : value.toGenericDict()) {
    TORCH_CHECK_VALUE(item.key().isString(), "checkpoint: '", name, "' is a dictionary with the ",
                      "key ", item.key(), "; keys must be strings");
    const auto& key = item.key().toStringRef();
    dict[key] = to_json(item.value(), name + "." + key, tensors);
  }
  return {{kDict, std::move(dict)}};
}

template <class Element, class Read>
c10::IValue typed_list(const Json& json, Read read) {
  c10::List<Element> list;
  for (const Json& element : json) list.push_back(read(element));
  return list;
}

c10::IValue list_from(const Json& json, const TensorsByName& tensors) {
  const auto all = [&](auto is) {
    return !json.empty() && std::all_of(json.begin(), json.end(), is);
  };
  if (all([](const Json& each) { return each.is_number_integer(); })) {
    return typed_list<int64_t>(json, [](const Json& each) { return each.get<int64_t>(); });
  }
  if (all([](const Json& each) { return each.is_number_float(); })) {
    return typed_list<double>(json, [](const Json& each) { return each.get<double>(); });
  }
  if (all([](const Json& each) { return each.is_string(); })) {
    return typed_list<std::string>(json, [](const Json& each) { return each.get<std::string>(); });
  }
  c10::impl::GenericList list(c10::AnyType::get());
  for (const Json& element : json) list.push_back(from_json(element, tensors));
  return list;
}

c10::IValue object_from(const Json& json, const TensorsByName& tensors) {
  if (json.contains(kDouble)) return special_double(json.at(kDouble).get<std::string>());
  if (json.contains(kTensor)) {
    const auto found = tensors.find(json.at(kTensor).get<std::string>());
    TORCH_CHECK(found != tensors.end(), "checkpoint: tensor ", json.at(kTensor).dump(),
                " of a per-rank item is not in its file");
    return found->second;
  }
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [key, value] : json.at(kDict).items()) {
    dict.insert(key, from_json(value, tensors));
  }
  return dict;
}

}  // namespace

Json to_json(const c10::IValue& value, const std::string& name, TensorsByName* tensors) {
  if (value.isNone()) return nullptr;
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return from_double(value.toDouble());
  if (value.isString()) return value.toStringRef();
  if (value.isTuple()) return from_elements(value.toTupleRef().elements(), name, tensors);
  if (value.isList()) return from_elements(value.toListRef(), name, tensors);
  if (value.isGenericDict()) return from_dict(value, name, tensors);
  TORCH_CHECK_VALUE(value.isTensor() && tensors != nullptr, "checkpoint: '", name, "' is a ",
                    value.tagKind(), ", which cannot be saved ",
                    value.isTensor() ? "there; give it in State::tensors" : "at all");
  tensors->emplace(name, value.toTensor());
  return {{kTensor, name}};
}

c10::IValue from_json(const Json& json, const TensorsByName& tensors) {
  switch (json.type()) {
    case Json::value_t::boolean:
      return json.get<bool>();
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
      return json.get<int64_t>();
    case Json::value_t::number_float:
      return json.get<double>();
    case Json::value_t::string:
      return json.get<std::string>();
    case Json::value_t::array:
      return list_from(json, tensors);
    case Json::value_t::object:
      return object_from(json, tensors);
    default:
      return {};
  }
}

c10::IValue from_json_like(const Json& json, const c10::IValue& like) {
  if (!like.isTuple() || !json.is_array()) return from_json(json);
  std::vector<c10::IValue> elements;
  for (const Json& element : json) elements.push_back(from_json(element));
  return c10::ivalue::Tuple::create(std::move(elements));
}

}  // namespace fsdp::internal::checkpoint
