#include "launch/host_messages.h"

#include <cstdint>

#include "comm/store/wire.h"

namespace ddpkit::launcher {
namespace {

using store::Reader;
using store::Writer;

Writer begin() { return Writer(store::Status::kOk); }

Reader fields_of(const std::string& text) {
  Reader fields(text);
  fields.code();
  return fields;
}

int read_int(Reader& fields) { return static_cast<int>(fields.number()); }

}  // namespace

std::string text_of(const RoundPlan& plan) {
  Writer fields = begin();
  fields.number(plan.exit_code.value_or(-1)).number(plan.port).number(static_cast<std::int64_t>(plan.members.size()));
  for (const int id : plan.members) fields.number(id);
  return fields.texts(plan.report).finish();
}

std::string text_of(const RoundEnd& end) {
  return begin().number(end.id).number(end.blamed_rank).text(end.text).finish();
}

std::string text_of(const HostResult& result) {
  return begin()
      .number(result.is_ok)
      .number(result.lost_peer)
      .number(result.exit_code)
      .number(result.signal)
      .text(result.text)
      .finish();
}

RoundPlan read_plan(const std::string& text) {
  Reader fields = fields_of(text);
  RoundPlan plan;
  if (const int code = read_int(fields); code >= 0) plan.exit_code = code;
  plan.port = read_int(fields);
  for (int left = read_int(fields); left > 0; --left) plan.members.push_back(read_int(fields));
  plan.report = fields.texts();
  return plan;
}

RoundEnd read_end(const std::string& text) {
  Reader fields = fields_of(text);
  RoundEnd end;
  end.id = read_int(fields);
  end.blamed_rank = read_int(fields);
  end.text = fields.text();
  return end;
}

HostResult read_result(const std::string& text) {
  Reader fields = fields_of(text);
  HostResult result;
  result.is_ok = fields.number() != 0;
  result.lost_peer = fields.number() != 0;
  result.exit_code = read_int(fields);
  result.signal = read_int(fields);
  result.text = fields.text();
  return result;
}

}  // namespace ddpkit::launcher
