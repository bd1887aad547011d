package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestSecretsOfMonitoring: a block of commands in metrics.md creates each Secret that config/prometheus reads.
func TestSecretsOfMonitoring(t *testing.T) {
	monitor, err := os.ReadFile("../config/prometheus/podmonitor.yaml")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	var commands strings.Builder
	for _, b := range block.FindAllStringSubmatch(string(page), -1) {
		if b[1] == "sh" {
			commands.WriteString(b[2])
		}
	}
	secrets := regexp.MustCompile(`Secret:\n +name: (\S+)`).FindAllStringSubmatch(string(monitor), -1)
	if len(secrets) == 0 {
		t.Fatal("found no Secret in podmonitor.yaml")
	}
	for _, s := range secrets {
		if !strings.Contains(commands.String(), "name: "+s[1]+",") {
			t.Errorf("no command of metrics.md creates the Secret %s", s[1])
		}
	}
}

// TestSecretsOfCommands: a command of the documents that writes a kubeconfig, or the key of a host, does not leave the file to other users.
func TestSecretsOfCommands(t *testing.T) {
	pages, err := filepath.Glob("*.md")
	if err != nil {
		t.Fatal(err)
	}
	written := regexp.MustCompile(`capstan (get kubeconfig|host credentials) .*>`)
	found := 0
	for _, page := range append(pages, "../README.md", "../internal/cli/host.go") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if written.MatchString(line) {
				found++
				if !strings.Contains(line, "(umask 077 && ") {
					t.Errorf("%s: expected (umask 077 && COMMAND), found %s", page, line)
				}
			}
		}
	}
	if found < 8 {
		t.Errorf("found only %d such commands", found)
	}
}
