// The key of a call: a row of 64-bit words. The op comes first, then each argument of its schema,
// defaults included. An argument begins with a word that has its tag in the highest byte. A tensor
// is its slot.
//
// Two calls whose keys in `keys.py` differ must differ here too. Else a call would be led to the
// state of another one.

#pragma once

#include "objects.h"

namespace hits {

using Words = c10::SmallVector<uint64_t, 48>;

// A dtype, a memory format and a layout of torch's are INT, because an `IValue` has them as ints.
// LAYOUT is the number of a sharded tensor's `Layout`. LEAF begins the metadata of a leaf.
enum class Tag : uint64_t {
  NONE = 1,
  INT,
  DOUBLE,
  BOOL,
  COMPLEX,
  STRING,
  DEVICE,
  TENSOR,
  LAYOUT,
  LIST,
  LEAF,
  INT_AT_RUN_TIME,
  DOUBLE_AT_RUN_TIME,
  COMPLEX_AT_RUN_TIME,
};

void put(Words& words, Tag tag, uint64_t more = 0) {
  words.push_back(static_cast<uint64_t>(tag) << 56 | more);
}

// Numbers count by their bits: 0.0 and -0.0 are two keys, and nan equals itself.
uint64_t bits(double number) {
  uint64_t word;
  std::memcpy(&word, &number, sizeof word);
  return word;
}

uint64_t hash_of(const uint64_t* words, size_t n) {
  uint64_t hash = n;
  for (size_t i = 0; i < n; ++i) {
    hash = (hash ^ words[i]) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  }
  return hash;
}

// Append the words of an argument that is no tensor and no list. False for what no key can hold,
// such as a random generator: Python handles the call then.
bool put_static(Words& words, const IValue& value) {
  if (value.isNone()) {
    put(words, Tag::NONE);
  } else if (value.isInt()) {
    put(words, Tag::INT);
    words.push_back(static_cast<uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    put(words, Tag::BOOL, value.toBool());
  } else if (value.isDouble()) {
    put(words, Tag::DOUBLE);
    words.push_back(bits(value.toDouble()));
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    put(words, Tag::COMPLEX);
    words.push_back(bits(number.real()));
    words.push_back(bits(number.imag()));
  } else if (value.isDevice()) {
    const auto device = value.toDevice();
    put(words, Tag::DEVICE);
    words.push_back(static_cast<uint64_t>(device.type()) << 8 |
                    static_cast<uint8_t>(device.index()));
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    put(words, Tag::STRING, text.size());
    for (size_t at = 0; at < text.size(); at += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + at, std::min(sizeof word, text.size() - at));
      words.push_back(word);
    }
  } else {
    return false;
  }
  return true;
}

}  // namespace hits
