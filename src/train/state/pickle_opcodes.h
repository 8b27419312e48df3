// Tier 0. The opcodes of Python's pickletools that state dicts contain.
#pragma once

namespace ddpkit::train {

/// Opcodes that torch.save writes (protocol 2), and NEWOBJ, so that an error can name the class.
enum class Opcode : unsigned char {
  kMark = '(',
  kEmptyTuple = ')',
  kStop = '.',
  kBinfloat = 'G',
  kBinint = 'J',
  kBinint1 = 'K',
  kBinint2 = 'M',
  kNone = 'N',
  kBinpersid = 'Q',
  kReduce = 'R',
  kBinunicode = 'X',
  kEmptyList = ']',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kAppends = 'e',
  kBinget = 'h',
  kLongBinget = 'j',
  kBinput = 'q',
  kLongBinput = 'r',
  kSetitem = 's',
  kTuple = 't',
  kSetitems = 'u',
  kEmptyDict = '}',
  kProto = 0x80,
  kNewobj = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewtrue = 0x88,
  kNewfalse = 0x89,
  kLong1 = 0x8a,
};

constexpr unsigned char kProtocol = 2;

}  // namespace ddpkit::train
