#!/usr/bin/env bash
# Checks the alerts of config/prometheus with promtool, and their tests. It needs Debian's package prometheus.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The content of spec, which is what Prometheus reads without its operator.
sed -n '/^spec:$/,$s/^  //p' config/prometheus/rules.yaml >"$work/capstan.rules.yaml"
cp config/prometheus/rules_test.yaml "$work/"
promtool check rules --lint=all --lint-fatal "$work/capstan.rules.yaml"
promtool test rules "$work/rules_test.yaml"
