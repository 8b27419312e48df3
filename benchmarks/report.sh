# shellcheck shell=bash
# `script/bench all`, `script/bench check` and `script/bench --gpu`: run all benchmarks and compare the ratios with the
# committed ones. Sourced by script/bench.

# Paths of the committed report and ratios.
report=$root/docs/performance.md
pictures=$root/docs/pictures
ratios=$root/benchmarks/ratios.tsv

# Markdown prefix of a section's title.
heading="##"

# section TITLE COMMAND...: runs script/bench COMMAND... and appends its output as a section. Shows a table of fixed
# width as it was printed. The command writes its other files to the temporary folder $made.
section() {
  local title=$1 start=$SECONDS
  shift
  log "$title: script/bench $*"
  if ! DDPKIT_BENCH_RATIOS=$made/ratios.tsv "$root/script/bench" "$@" >"$made/output" 2>"$made/errors"; then
    cat "$made/output" "$made/errors" >&2
    die "script/bench $1 failed (its output is above)"
  fi
  {
    printf '%s %s\n\n<!-- docs-test: options: it measures for minutes -->\n```sh\nscript/bench %s\n```\n\n' "$heading" "$title" "${*//$made/.}"
    if grep -q '^|' "$made/output"; then
      cat "$made/output"
    else
      printf '<!-- docs-test: skip: what a measurement has printed -->\n```text\n'
      sed 's/ *$//' "$made/output"
      printf '```\n'
    fi
    printf '\n'
  } >>"$made/sections"
  log "$title: $((SECONDS - start)) s"
}

picture() {
  printf '![%s](pictures/%s)\n\n' "$1" "$2" >>"$made/sections"
}

# note_collectives CSV, note_steps CSV: compute the ratios from the rows of `ddpkit bench collectives` and `ddpkit bench
# step`. All-reduce has four ratios to gloo and four to the best peer, each other collective two. They are geometric
# means over the sizes: a peer's result at a single size varies between runs by more than the changes to detect. The best
# peer differs between sizes.
note_collectives() {
  awk -F, '
    function note(key, other, ratio) {
      key = key ": shm over " other
      if (!(key in count)) order[++keys] = key
      sum[key] += log(ratio)
      ++count[key]
    }
    NR > 1 { us[$1, $3, $4, $2, $5] = $6; if ($2 == "shm") { rows[++shm_rows] = $0 } }
    END {
      count_of_peers = split("gloo openmpi mpich intelmpi oneccl", peers, " ")
      for (i = 1; i <= shm_rows; ++i) {
        split(rows[i], row, ",")
        range = row[4] < 4096 ? " below 4 KiB" : row[1] != "all_reduce" ? "" : row[4] <= 65536 ? " of 4 to 64 KiB" : row[4] <= 4194304 ? " of 256 KiB to 4 MiB" : " of 16 to 96 MiB"
        what = row[1] range ", " row[3] " ranks, " row[5] " memory"
        best = 0
        for (p = 1; p <= count_of_peers; ++p) {
          other = us[row[1], row[3], row[4], peers[p], "private"]
          if (other == 0) continue
          if (best == 0 || other < best) best = other
          if (peers[p] == "gloo") note(what, "gloo", row[6] / other)
        }
        if (best > 0) note(what, "the best peer", row[6] / best)
      }
      for (i = 1; i <= keys; ++i) printf "%s\t%.4f\n", order[i], exp(sum[order[i]] / count[order[i]])
    }' "$1" >>"$made/ratios.tsv"
}

# table_of_peers CSV: appends a table to the section: each row of shm beside the fastest peer, losses first.
table_of_peers() {
  {
    printf '| collective | bytes | memory | shm, us | fastest peer | us | share |\n| --- | ---: | --- | ---: | --- | ---: | ---: |\n'
    awk -F, '
      NR == 1 || $2 == "limit" { next }
      $2 == "shm" { rows[++count] = $0; next }
      { key = $1 "," $3 "," $4; if (!(key in us) || $6 < us[key]) { us[key] = $6; peer[key] = $2 } }
      END {
        for (i = 1; i <= count; ++i) {
          split(rows[i], row, ",")
          key = row[1] "," row[3] "," row[4]
          if (key in us) printf "| %s | %d | %s | %.2f | %s | %.2f | %.2f |\n", row[1], row[4], row[5], row[6], peer[key], us[key], row[6] / us[key]
        }
      }' "$1" | sort -t '|' -k 8,8nr -s
    printf '\n'
  } >>"$made/sections"
}

note_steps() {
  awk -F, '
    NR == 1 { for (i = 1; i <= NF; ++i) column[$i] = i; next }
    {
      key = $column["model"] ", " $column["optimizer"]
      if ($column["system"] ~ /^python-ddp-(gloo|nccl)/) python[key] = $column["us"]
      if ($column["system"] == "python-ddp-shm") python_shm[key] = $column["us"]
      if ($column["system"] ~ /^python-ddp-nccl/ && $column["ranks"] == 1) python_at_1[key] = $column["us"]
      if ($column["system"] == "python-alone") python_alone[key] = $column["us"]
      if ($column["system"] ~ /^(ddpkit|alone)-(shm|nccl|fused|graphed)/) {
        name[++count] = key ": " $column["system"]
        of[count] = key
        us[count] = $column["us"]
        ratio[count] = $column["ratio_to_alone"]
      }
    }
    END {
      for (i = 1; i <= count; ++i) {
        printf "step of %s over a step alone\t%.4f\n", name[i], ratio[i]
        if (python[of[i]] > 0) printf "step of %s over Python DDP\t%.4f\n", name[i], us[i] / python[of[i]]
      }
      for (key in python_shm)
        if (python[key] > 0) printf "step of %s: Python DDP over shm, over gloo\t%.4f\n", key, python_shm[key] / python[key]
      # At world size 1, a wrapper should cost nothing.
      for (key in python_at_1)
        if (python_alone[key] > 0) printf "step of %s: Python DDP over Python alone\t%.4f\n", key, python_at_1[key] / python_alone[key]
    }' "$1" >>"$made/ratios.tsv"
}

# note_fsdp CSV: computes the ratios of sharded weights from the rows of `ddpkit bench step --update fused,sharded,fsdp`.
note_fsdp() {
  awk -F, '
    NR == 1 { for (i = 1; i <= NF; ++i) column[$i] = i; next }
    {
      model = $column["model"]
      if (!(model in seen)) { seen[model]; models[++count] = model }
      us[model, $column["system"]] = $column["us"]
      peak[model, $column["system"]] = $column["peak_bytes"]
    }
    function note(model, what, of, ours, other) {
      if (of[model, other] > 0) printf "%s of %s, adamw: %s over %s\t%.4f\n", what, model, ours, other, of[model, ours] / of[model, other]
    }
    END {
      for (i = 1; i <= count; ++i) {
        note(models[i], "step", us, "ddpkit-shm-sharded", "ddpkit-shm-fused")
        note(models[i], "step", us, "ddpkit-shm-fsdp", "ddpkit-shm-fused")
        note(models[i], "step", us, "ddpkit-shm-fsdp", "python-fsdp-gloo")
        note(models[i], "peak memory", peak, "ddpkit-shm-fsdp", "ddpkit-shm-fused")
        note(models[i], "peak memory", peak, "ddpkit-shm-fsdp", "python-fsdp-gloo")
        note(models[i], "step", us, "alone-checkpointed", "alone")
      }
    }' "$1" >>"$made/ratios.tsv"
}

# note_recovery CSV: computes the ratios of ddpkit-elastic from the rows of `ddpkit bench recovery`.
note_recovery() {
  awk -F, '
    NR > 1 { ms[$3, $1] = $4; if ($1 == "ddpkit-elastic") { sizes[++count] = $3 } else { others[$1] } }
    END {
      for (i = 1; i <= count; ++i)
        for (other in others)
          if (ms[sizes[i], other] > 0)
            printf "kill to next step, %d MiB more memory per rank: ddpkit-elastic over %s\t%.4f\n", sizes[i], other, \
              ms[sizes[i], "ddpkit-elastic"] / ms[sizes[i], other]
    }' "$1" >>"$made/ratios.tsv"
}

# The parts that `all` and `check` measure. Each part has a function of its name below.
parts=(collectives crowded sgd adamw fsdp recovery har asr video clstm_ppo checkpoint hosts estimate micro headers)
gpu_parts=(gpu_sgd gpu_one gpu_adamw gpu_micro gpu_har gpu_trainers gpu_collectives)

measure_collectives() {
  section "All-reduce and its kin, 2 ranks" collectives --rounds 4 -b 16 --collective all_reduce,broadcast,all_gather,reduce_scatter \
    --csv "$made/collectives.csv" --plot "$made/collectives.svg"
  note_collectives "$made/collectives.csv"
  table_of_peers "$made/collectives.csv"
  picture "Bus bandwidth over size" collectives.svg
}
measure_crowded() {
  section "All-reduce of 8 ranks on these cores" collectives --rounds 4 -n 8 --collective all_reduce --memory private \
    --csv "$made/crowded.csv"
  note_collectives "$made/crowded.csv"
  table_of_peers "$made/crowded.csv"
}
measure_sgd() {
  section "A step with SGD, over model sizes" step --peers --starts 3 --backend shm \
    --model mlp-10k,mlp-106k,mlp-1m,mlp-7.6m,cnn,lstm,transformer --csv "$made/sgd.csv"
  note_steps "$made/sgd.csv"
}
measure_adamw() {
  section "A step with AdamW, by how weights are updated" step --peers --starts 3 --backend shm --optimizer adamw \
    --model mlp-106k,mlp-7.6m --csv "$made/adamw.csv"
  note_steps "$made/adamw.csv"
}
measure_fsdp() {
  section "Fully sharded training" step --peers --starts 2 --backend shm --optimizer adamw --update fused,sharded,fsdp \
    --activation-checkpoint --batch 16 --model transformer,transformer-25m --csv "$made/fsdp.csv"
  note_fsdp "$made/fsdp.csv"
}
measure_recovery() {
  section "From the kill of a rank to the next step" recovery --peers --rounds 9 --csv "$made/recovery.csv"
  note_recovery "$made/recovery.csv"
  # Without the peers, which take minutes for each round.
  section "From the kill of a rank to the next step, with 4 GiB more memory per rank" recovery --rounds 5 --resident-mib 4096
}
measure_har() {
  section "har: DataParallel and DistributedDataParallel" har --peers --devices 1,2 --plot "$made/har.svg"
  picture "Throughput of the har trainer" har.svg
}
measure_asr() { section "asr: step, start and memory" asr --peers; }
measure_video() { section "video: decoding and model together" video --peers --batches 8; }
measure_clstm_ppo() { section "clstm_ppo: rollouts and updates" clstm_ppo; }
measure_checkpoint() { section "Checkpoints" checkpoint; }
measure_hosts() {
  [ "$(id -u)" -eq 0 ] || return 0
  section "Two hosts of two ranks, a link of 1 Gbit/s" hosts 1gbit
  section "Two hosts of two ranks, a link as fast as the kernel" hosts
}
measure_estimate() { section "What the estimate predicts for two ranks" estimate; }
measure_micro() { section "Kernels and optimizers alone" micro; }
measure_headers() { section "The headers" headers; }

# Arguments of the GPU parts. On virtual GPUs, small models show that the scripts work.
gpu_choices() {
  if [ ${#on_virtual[@]} -gt 0 ]; then
    gpu=(--gpu --virtual) peers=() models=mlp-10k large_model=mlp-10k
  else
    gpu=(--gpu) peers=(--peers) models=mlp-7.6m,cnn,lstm,transformer large_model=mlp-7.6m
  fi
}

measure_gpu_sgd() {
  section "A step with SGD on GPUs" "${gpu[@]}" step "${peers[@]}" --model "$models" --csv "$made/sgd.csv"
  note_steps "$made/sgd.csv"
}
# With one GPU, the part above is at world size 1.
measure_gpu_one() {
  [ "$(list_gpus | wc -l)" -gt 1 ] || return 0
  section "A step at world size 1 on a GPU" "${gpu[@]}" step -n 1 "${peers[@]}" --model "$models" --csv "$made/one.csv"
  note_steps "$made/one.csv"
}
measure_gpu_adamw() {
  section "A step with AdamW on GPUs" "${gpu[@]}" step "${peers[@]}" --optimizer adamw --model "$large_model" \
    --csv "$made/adamw.csv"
  note_steps "$made/adamw.csv"
}
measure_gpu_micro() { section "Optimizers alone on a GPU" "${gpu[@]}" micro '^gpu/'; }
measure_gpu_collectives() {
  [ "$(list_gpus | wc -l)" -gt 1 ] || { log "Collectives on GPUs: skipped, because one GPU exchanges nothing"; return; }
  section "Collectives on GPUs" "${gpu[@]}" collectives --collective all_reduce,all_gather,reduce_scatter,broadcast
}
measure_gpu_har() { section "har on GPUs" "${gpu[@]}" har "${peers[@]}" --rounds 2; }
measure_gpu_trainers() { section "Trainers on GPUs" "${gpu[@]}" trainers; }

# measure PART...: runs the parts. Writes $made/sections (text) and $made/measured.tsv (ratios: name, value, part). With
# $resume, keeps the results of the parts that have ended in this folder.
measure() {
  local part results=()
  for part; do
    results+=("$made/$part")
    [ -z "${resume:-}" ] || [ ! -e "$made/$part.md" ] || continue
    : >"$made/sections"
    : >"$made/ratios.tsv"
    "measure_$part"
    sed "s/\$/\t$part/" "$made/ratios.tsv" >"$made/$part.tsv"
    mv "$made/sections" "$made/$part.md"
  done
  cat "${results[@]/%/.md}" >"$made/sections"
  cat "${results[@]/%/.tsv}" >"$made/measured.tsv"
}

# Prints the table of the measured ratios, losses first.
ratios_table() {
  printf '| cost | as a share | 1 / share |\n| --- | ---: | ---: |\n'
  awk -F '\t' '{ rows[$2 <= 1] = rows[$2 <= 1] sprintf("| %s | %.3f | %.3g |\n", $1, $2, 1 / $2) }
    END { printf "%s%s", rows[0], rows[1] }' "$made/measured.tsv"
  printf '\n'
}

# Prints the GPU part of the existing report, or the beginning of a new one.
part_of_gpus() {
  if grep -q '^## On GPUs' "$report" 2>/dev/null; then
    sed -n '/^## On GPUs/,$p' "$report"
  else
    printf '## On GPUs\n\nNot yet measured: `script/bench --gpu`, on a host with NVIDIA GPUs, measures and writes this part.\n'
  fi
}

write_report_of_gpus() {
  local written=$report
  [ ${#on_virtual[@]} -eq 0 ] || written=$build/void-performance.md
  {
    if [ ${#on_virtual[@]} -gt 0 ]; then
      printf '# VOID: virtual GPUs\n\nThe figures of this page have no meaning.\n\n'
    elif [ -e "$report" ]; then
      sed '/^## On GPUs/,$d' "$report"
    else
      printf '# Performance\n\n'
    fi
    printf '## On GPUs\n\nMeasured on %s: %s.\n\n' "$(date -u +%F)" \
      "$(list_gpus | sort | uniq -c | sed 's/^ *\([0-9]*\) \(.*\), \(.*\)/\1 x \2, driver \3/' | paste -sd ';')"
    ratios_table
    cat "$made/sections"
  } | cat -s >"$made/report"
  cp "$made/report" "$written"
  log "Written: ${written#"$root"/}"
}

# In MB, the part that one core can use. The C library may report the cache of the whole processor.
last_level_cache() {
  { sed 's/K$//' /sys/devices/system/cpu/cpu0/cache/index3/size 2>/dev/null \
    || getconf LEVEL3_CACHE_SIZE | awk '{ print $1 / 1024 }'; } | awk '{ printf "%.0f MB", $1 / 1024 }'
}

# Prints the machine and the compiler. Cloud machines hide the processor's name, so the model number and caches identify
# the processor.
machine() {
  awk -F '[[:space:]]*: ' '
    FILENAME == "/proc/meminfo" { if ($1 == "MemTotal") memory = int($2 / 1048576 + 0.5); next }
    /^$/ { exit }
    { cpu[$1] = $2 }
    END {
      printf "%s (family %s, model %s, stepping %s)", cpu["model name"], cpu["cpu family"], cpu["model"], cpu["stepping"]
      printf ", %s cores, %d GB of memory", cores, memory
    }' cores="$(nproc)" /proc/meminfo /proc/cpuinfo
  printf ', last-level cache %s; %s; LibTorch %s' "$(last_level_cache)" "$(c++ --version | head -n 1)" "$torch_version"
}

# Prints the machine of the committed report.
machine_of_report() {
  sed -n 's/^Measured on [^:]*: \(.*\)\.$/\1/p;/^## On GPUs/q' "$report" | head -n 1
}

# put_report DATE: writes the report and its ratios from $made/sections and $made/measured.tsv.
put_report() {
  {
    cat <<'EOF'
# Performance

`script/bench all` writes this page. All figures except those on GPUs are from one machine. The figures of a section are from one run.
ddpkit and its peers do the same work, in turns. [benchmarks.md](benchmarks.md) explains the columns and `script/bench check`.

Ratios come first; less is better. Shares above 1 are losses, and the first rows of the table.
Ratios depend on the machine too, but less than times.

EOF
    printf 'Measured on %s: %s.\n\n' "$1" "$(machine)"
    printf '## Ratios\n\n'
    ratios_table
    cat "$made/sections"
    part_of_gpus
  } | cat -s >"$made/report"
  cp "$made/report" "$report"
  mkdir -p "$pictures"
  find "$made" -name '*.svg' -exec cp {} "$pictures" \;
  cp "$made/measured.tsv" "$ratios"
  log "Written: ${report#"$root"/}, ${ratios#"$root"/}, ${pictures#"$root"/}"
}

write_report() { put_report "$(date -u +%F)"; }

# Replaces the measured sections of the report; keeps all others.
write_report_of_parts() {
  local there missing
  there=$(machine_of_report)
  [ -z "$there" ] || [ "$there" = "$(machine)" ] ||
    die "${report#"$root"/} is of another machine, $there: script/bench all measures all of it here, $(machine)"
  if ! missing=$(awk -v kept="$made/kept" '
    FNR == 1 { title = "" }
    /^## / { title = substr($0, 4) }
    NR == FNR { text[title] = text[title] $0 "\n"; next }
    title == "On GPUs" { exit }
    title == "" || title == "Ratios" { next }
    !(title in text) { print >kept; next }
    !placed[title]++ { printf "%s", text[title] >kept }
    END {
      for (title in text) if (!placed[title]) { printf "no section \"%s\"", title; exit 1 }
    }' "$made/sections" "$report"); then
    die "in ${report#"$root"/} there is $missing: script/bench all writes it whole"
  fi
  mv "$made/kept" "$made/sections"
  awk -F '\t' '
    NR == FNR { new[$3] = new[$3] $0 "\n"; next }
    !($3 in new) { print; next }
    !placed[$3]++ { printf "%s", new[$3] }
    END { for (part in new) if (!placed[part]) printf "%s", new[part] }' "$made/measured.tsv" "$ratios" >"$made/all.tsv"
  mv "$made/all.tsv" "$made/measured.tsv"
  put_report "$(sed -n 's/^Measured on \([^:]*\):.*/\1/p' "$report" | head -n 1)"
}

# compare_ratios BEFORE AFTER: prints a table. Returns 1 if a ratio is missing or over 15 % worse. Skips parts that this
# host cannot measure. With a third argument, prints only the parts with such a ratio.
compare_ratios() {
  awk -F '\t' -v only_parts="${3:-}" '
    NR == FNR { before[$1] = $2; part[$1] = $3; order[++count] = $1; next }
    { after[$1] = $2; measured[$3] = 1 }
    END {
      for (i = 1; i <= count; ++i) {
        name = order[i]
        if (!(part[name] in measured)) { verdict = "skipped"; change = 0 }
        else if (!(name in after)) { verdict = "MISSING"; change = 1 }
        else {
          change = after[name] / before[name] - 1
          verdict = change > 0.15 ? "WORSE" : change < -0.15 ? "better" : "as before"
        }
        if (change > 0.15) { bad = 1; bad_parts[part[name]] = 1 }
        if (!only_parts) printf "%-10s %8.4f %8.4f %+6.1f %%  %s\n", verdict, before[name], after[name], 100 * change, name
      }
      if (only_parts) for (p in bad_parts) print p
      exit bad
    }' "$1" "$2"
}

# check_ratios [PART...]: without PART, checks all parts.
check_ratios() {
  local has_ratios again here there before=$made/before.tsv
  [ $# -gt 0 ] || set -- "${parts[@]}"
  mapfile -t has_ratios < <(printf '%s\n' "$@" | grep -Fxf <(cut -f 3 "$ratios"))
  [ ${#has_ratios[@]} -gt 0 ] || die "there are no ratios of: $*"
  awk -F '\t' -v chosen="$*" 'index(" " chosen " ", " " $3 " ")' "$ratios" >"$before"
  here=$(machine)
  measure "${has_ratios[@]}"
  # Another process may have disturbed the run: parts that look worse are measured again, and the better figure counts.
  mapfile -t again < <(compare_ratios "$before" "$made/measured.tsv" parts)
  if [ ${#again[@]} -gt 0 ]; then
    log "Worse by over 15 %, so measured again: ${again[*]}"
    cp "$made/measured.tsv" "$made/first.tsv"
    measure "${again[@]}"
    cp "$made/measured.tsv" "$made/second.tsv"
    awk -F '\t' -v OFS='\t' '
      NR == FNR { second[$1] = $2; next }
      { print $1, ($1 in second && second[$1] < $2 ? second[$1] : $2), $3 }' "$made/second.tsv" "$made/first.tsv" >"$made/measured.tsv"
  fi
  there=$(machine_of_report)
  if [ "$there" != "$here" ]; then
    log "Compared with another machine, $there. This one: $here. The ratios to peers depend on the machine: for figures of this one, run script/bench all, then check again."
  fi
  compare_ratios "$before" "$made/measured.tsv" || die "ratios have worsened by over 15 % or are missing (above)"
}

# Makes the folder of a whole report, which outlives a failure; with $resume, continues the unfinished one.
start_whole_report() {
  made=$build/report
  if [ -z "$resume" ]; then
    rm -rf "$made"
    mkdir -p "$made"
    machine >"$made/machine"
  elif [ ! -e "$made/machine" ]; then
    die "no report is unfinished: script/bench all starts one"
  elif [ "$(cat "$made/machine")" != "$(machine)" ]; then
    die "the unfinished report is of another machine, $(cat "$made/machine"): script/bench all starts one of this, $(machine)"
  fi
  log "If it ends early: script/bench all --resume keeps the parts that have ended"
}

# bench_report gpus, bench_report check [PART...], bench_report all [--resume | PART...]
bench_report() {
  local what=$1 part resume=
  shift
  if [ "$what ${1:-}" = "all --resume" ]; then
    shift
    [ $# -eq 0 ] || wrong_use "--resume takes no parts"
    resume=yes
  fi
  for part; do
    printf '%s\n' "${parts[@]}" | grep -Fxq -e "$part" || wrong_use "there is no part '$part'. There are: $(printf '%s, ' "${parts[@]}" | sed 's/, $//')"
  done
  if [ "$what" = all ] && [ $# -eq 0 ]; then
    start_whole_report
  else
    made=$(mktemp -d)
    trap 'rm -rf "$made"' EXIT
  fi
  [ "$what" = gpus ] || "$root/script/bootstrap" --peers
  case $what in
    gpus)
      heading="###"
      gpu_choices
      measure "${gpu_parts[@]}"
      write_report_of_gpus
      ;;
    all)
      if [ $# -eq 0 ]; then
        measure "${parts[@]}"
        write_report
        rm -r "$made"
      else
        measure "$@"
        write_report_of_parts
      fi
      ;;
    check)
      [ -s "$ratios" ] || die "there is no ${ratios#"$root"/} to compare with: script/bench all writes it"
      check_ratios "$@"
      ;;
  esac
  [ "$what" = check ] || "$root/tests/scripts/figures" --write
}
