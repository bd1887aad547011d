#!/usr/bin/env bash
# Gives modules of programs the versions that the root module has of the libraries that client-go uses. Then Go compiles them, and
# client-go, once for all programs. Other libraries keep their versions: those of Kubernetes are the ones of its release.
#
#   hack/libraries.sh                    prints these libraries, each as PATH@VERSION
#   hack/libraries.sh MODULE-FOLDER...   changes modules
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t libraries < <(go list -deps -f '{{with .Module}}{{.Path}}@{{.Version}}{{end}}' k8s.io/client-go/{dynamic,kubernetes,tools/cache,tools/clientcmd} | sort -u)
if (($# == 0)); then
	printf '%s\n' "${libraries[@]}"
	exit
fi
for folder in "$@"; do
	used=()
	for library in "${libraries[@]}"; do
		if grep -qE "^(require)?\s*${library%@*} v" "$folder/go.mod"; then
			used+=("$library")
		fi
	done
	(cd "$folder" && go get "${used[@]}" && go mod tidy)
done
