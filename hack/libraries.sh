#!/usr/bin/env bash
# Gives modules of programs the versions that the root module has of the libraries that client-go uses. Then Go compiles them, and
# client-go, once for all programs. Other libraries keep their versions: those of Kubernetes are the ones of its release.
#
#   hack/libraries.sh MODULE-FOLDER...
set -euo pipefail
cd "$(dirname "$0")/.."

# The modules replace those of Kubernetes itself, or require them directly.
mapfile -t libraries < <(go list -deps -f '{{with .Module}}{{.Path}}@{{.Version}}{{end}}' k8s.io/client-go/{dynamic,kubernetes,tools/cache,tools/clientcmd} |
	grep -vE '^k8s\.io/(api|apimachinery|client-go)@' | sort -u)
for folder in "$@"; do
	used=()
	for library in "${libraries[@]}"; do
		if grep -qE "^(require)?\s*${library%@*} v" "$folder/go.mod"; then
			used+=("$library")
		fi
	done
	(cd "$folder" && go get "${used[@]}" && go mod tidy)
done
