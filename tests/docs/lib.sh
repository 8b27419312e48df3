# Functions of the docs tests. Sourced; the caller has set -euo pipefail, and $blocks, $source and $build.
# shellcheck shell=bash disable=SC2034,SC2154,SC2001

status=0
wrong() {
  printf '%s\n' "$*" >&2
  status=1
}

# rule ID NAME: prints the text after NAME in the block's rules; fails if there is none.
rule() {
  local line
  while IFS= read -r line; do
    if [[ $line == "$2" || $line == "$2 "* || $line == "$2:"* ]]; then
      line=${line#"$2"}
      printf '%s\n' "${line# }"
      return 0
    fi
  done <"$blocks/$1.rules"
  return 1
}

# split_rule TEXT: splits "/RE/: REASON" or ": REASON" into $pattern (empty: all lines) and $reason.
split_rule() {
  pattern='' reason=${1#*: }
  if [[ $1 == /* ]]; then
    pattern=${1#/}
    pattern=${pattern%%/: *}
    reason=${1#*/: }
  fi
}

declare -A help_texts
# help_of COMMAND...: sets $help to the command's help. Runs the command once.
help_of() {
  if [ -z "${help_texts[$*]:-}" ]; then help_texts[$*]=$("$@" --help 2>&1 </dev/null) || return 1; fi
  help=${help_texts[$*]}
}

# check_options WHERE COMMAND...: checks a command without running it. The program, subcommands and options must exist
# in the programs' help.
check_options() {
  local where=$1 command=() behind=() word name
  shift
  while [[ ${1:-} =~ ^[A-Z_][A-Z0-9_]*= ]]; do shift; done
  [ $# -gt 0 ] || return 0
  case $1 in
    ddpkit | har | asr | video | clstm_ppo | gpt) command=("$build/bin/$1") ;;
    build/bin/*) command=("$build/bin/${1#build/bin/}") ;;
    script/* | examples/*/*.sh) command=("$source/$1") ;;
    *) wrong "$where: the program $1 has no known --help; give the block the rule skip"; return ;;
  esac
  name=$1
  shift
  if [[ $name == *bench_* && -e $source/benchmarks/${name##*bench_}.cpp && ! -x ${command[0]} ]] ||
    [[ -d $source/examples/${name##*/} && ! -x ${command[0]} ]]; then
    return  # This build lacks the library.
  fi
  [ -x "${command[0]}" ] || { wrong "$where: there is no program $name"; return; }
  if [[ $name == script/bench && ${1:-} == --gpu ]]; then shift; fi  # --gpu precedes the name of a benchmark.
  # Subcommands that the help names.
  while [[ ${1:-} =~ ^[a-z_]+$ ]]; do
    help_of "${command[@]}" || { wrong "$where: $name --help failed"; return; }
    if [[ $name == script/bench ]]; then
      grep -qE "^ +$1( |\$)" <<<"$help" || wrong "$where: $name knows no $1"
      case $1 in
        step | collectives | recovery) command=("$build/bin/ddpkit" bench "$1") ;;
        har | asr | video | estimate) [ ! -x "$build/bin/bench_$1" ] || command=("$build/bin/bench_$1") ;;
      esac
      shift
      break
    fi
    # No pipe to grep -q: it ends at the first match, and with pipefail the writer's SIGPIPE would count as no match.
    grep -qE "^  $1( |\$)" < <(sed -n '/^Subcommands:/,$p' <<<"$help") || break
    command+=("$1")
    shift
  done
  if [[ "${command[*]:1}" == run && $name == *ddpkit ]]; then
    while [ $# -gt 0 ] && [ "$1" != -- ]; do behind+=("$1"); shift; done
    if [ $# -gt 1 ] && [[ $2 != ./* ]]; then check_options "$where" "${@:2}"; fi
    set -- "${behind[@]}"
  fi
  help_of "${command[@]}" || { wrong "$where: $name --help failed"; return; }
  for word; do
    [[ $word =~ ^--?[a-zA-Z] ]] || continue
    word=${word%%=*}
    grep -qE -- "(^|[^a-zA-Z0-9-])${word//_/-}([^a-zA-Z0-9-]|\$)" <<<"$help" || wrong "$where: $name knows no option $word"
  done
}

# words TEXT: splits TEXT as the shell does, without its comment, into $split.
words() {
  local text=$1
  text=$(sed 's/\(^\|[[:space:]]\)#.*//' <<<"$text")
  split=()
  [ -z "${text//[[:space:]]/}" ] || mapfile -t split < <(xargs -n 1 printf '%s\n' <<<"$text")
}
