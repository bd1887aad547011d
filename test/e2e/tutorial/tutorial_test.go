//go:build e2e && tutorial

// Package tutorial types the commands of docs/tutorial.md.
package tutorial

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"capstan.dev/capstan/internal/testenv"
)

const stateFolder = "/var/lib/capstan" // the default of capstan up, which the tutorial uses

// block is a command block or a manifest of the tutorial.
type block struct{ section, language, text string }

// blocks returns the blocks of the tutorial in their order.
func blocks(t *testing.T) (all []block) {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(testenv.Root(), "docs", "tutorial.md"))
	if err != nil {
		t.Fatal(err)
	}
	section := ""
	for _, found := range regexp.MustCompile("(?s)\n##+ ([^\n]+)|\n```(sh|yaml)\n(.*?)\n```").FindAllStringSubmatch(string(page), -1) {
		if found[1] != "" {
			section = found[1]
			continue
		}
		all = append(all, block{section, found[2], found[3]})
	}
	return all
}

// typed contains what a reader types in place of a line: a value that an earlier output shows, or the end of a command that does not
// end by itself. Each entry must be used.
var typed = map[string]string{
	// `make test-tutorial` has done this.
	"make setup build": "",
	"capstan shell $WORKER -- kill -9 PID": "capstan shell $WORKER -- kill -9 " +
		`$(capstan shell $WORKER -- /opt/capstan/capstan-init service list | awk '$1 == "kubelet" { print $3 }')`,
	// A reader ends the watch when the Node is Ready again.
	"kubectl --kubeconfig shop.kubeconfig get nodes --watch": `until [ "$(capstan logs $WORKER | grep -c '"Machine starts"')" = 2 ]; do sleep 0.2; done
		kubectl --kubeconfig shop.kubeconfig wait node --all --for condition=Ready --timeout 3m`,
}

// promised contains what the tutorial says about the output of the block with a command. Each entry must be used.
var promised = map[string]string{
	"get kubeconfig shop >":              `(?m)^shop-\S+ +Ready .* v1\.35\.4 (?s:.*)^shop-\S+ +Ready .* v1\.35\.4 (?s:.*)^shop-\S+ +Ready .* v1\.35\.4 `,
	"exec deployment/hello":              `\bhello-[0-9a-z]+-[0-9a-z]+`,
	"get etcdmembers":                    `(?m)^shop-control-plane-\S+(?s:.*)^shop-control-plane-\S+(?s:.*)^shop-control-plane-\S+`,
	"shop.kubeconfig get nodes\nkubectl": `(?m)^hello-\S+ +1/1 +Running +0 `,
	"kill -9 PID":                        `(?m)^kubelet\b`,
	"capstan top":                        `\bshop\b`,
	"capstan support-bundle":             `\.tar\.gz`,
}

// TestTutorial types each command block of the tutorial.
func TestTutorial(t *testing.T) {
	if found, err := os.ReadDir(stateFolder); len(found) > 0 || err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("expected a box without a management plane in %s, found %d files, %v: see capstan down", stateFolder, len(found), err)
	}
	folder := t.TempDir()
	environment := filepath.Join(folder, "environment")
	if err := os.WriteFile(environment, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	reader := &reader{t: t, folder: folder, environment: environment}
	t.Cleanup(func() {
		if t.Failed() {
			_, _ = reader.run("capstan down --yes")
		}
	})
	used := map[string]bool{}
	for _, b := range blocks(t) {
		switch {
		case b.language == "yaml":
			if err := os.WriteFile(filepath.Join(folder, "hello.yaml"), []byte(b.text+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			continue
		case strings.HasPrefix(b.text, "apt install "): // an alternative to the next block
			continue
		}
		reader.types(b, used)
	}
	for _, line := range slices.Concat(slices.Collect(maps.Keys(typed)), slices.Collect(maps.Keys(promised))) {
		if !used[line] {
			t.Errorf("the tutorial has no line %q", line)
		}
	}
}

// reader types commands into a shell. Variables outlive a block.
type reader struct {
	t                   *testing.T
	folder, environment string
}

// types runs a block as the reader types it, and checks what the tutorial promises.
func (r *reader) types(b block, used map[string]bool) {
	r.t.Helper()
	var lines []string
	for line := range strings.Lines(b.text) {
		line = strings.TrimSuffix(line, "\n")
		if instead, found := typed[line]; found {
			used[line] = true
			line = instead
		}
		lines = append(lines, strings.ReplaceAll(line, "$PWD/bin", testenv.Root()+"/bin"))
	}
	began := time.Now()
	output, err := r.run(strings.Join(lines, "\n"))
	r.t.Logf("%s, %.1f s:\n%s\n%s", b.section, time.Since(began).Seconds(), b.text, output)
	if err != nil {
		r.t.Fatalf("%s: %v", b.section, err)
	}
	for command, want := range promised {
		if !strings.Contains(b.text, command) {
			continue
		}
		used[command] = true
		if !regexp.MustCompile(want).MatchString(output) {
			r.t.Errorf("%s: the output does not match %s", b.section, want)
		}
	}
}

func (r *reader) run(commands string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", "set -a; . "+r.environment+"\n"+commands+"\nexport -p > "+r.environment)
	c.Dir = r.folder
	c.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "KUBECONFIG=") })
	output, err := c.CombinedOutput()
	return string(output), err
}
