package docs

import (
	"os"
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
