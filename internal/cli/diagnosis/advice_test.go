package diagnosis

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// goodReasons are the reasons of conditions that block nobody.
var goodReasons = []string{
	"Available", "Used", "NoLongerNeeded", "Succeeded", "Restored", "Healthy", "NotUpdating", "NotRotating", "Voting", "Left", "Approved", "Stopped", "Ready",
	"Connected", "Drained", "HostsAvailable", "NetworkReady", "LoadBalancerReady", "EndpointExternal", "BootAllowed", "HostAssigned", "AddressesAssigned", "MachineRunning",
	"BootstrapSucceeded", "ServicesHealthy", "UpdateSucceeded", "Valid", "InRange", "NotOverlapping", "AddressAllocated",
	"ServicesPublished", "TunnelReady", "FencingSet", "Rebooted", "Applied", "Free", "Initialized", "CertificatesNotExpiring",
	"NotReady",   // summarizes other conditions
	"HostFenced", // an event
}

// TestAdvice: each reason of the API has advice, unless it blocks nobody. Each section exists and lists the reason.
func TestAdvice(t *testing.T) {
	page, err := os.ReadFile("../../../" + troubleshooting)
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for _, section := range strings.Split(string(page), "\n## ")[1:] {
		title, content, _ := strings.Cut(section, "\n")
		sections[strings.ReplaceAll(strings.ToLower(title), " ", "-")] = content
	}
	reasons := reasonsOfAPI(t)
	if len(reasons) < 90 {
		t.Fatalf("found %d reasons", len(reasons))
	}
	for _, reason := range reasons {
		if _, found := adviceByReason[reason]; found == slices.Contains(goodReasons, reason) {
			t.Errorf("reason %s: has advice: %v; want advice, or an entry in goodReasons", reason, found)
		}
	}
	for reason, a := range adviceByReason {
		content, found := sections[a.section]
		if a.do == "" || !found || !strings.Contains(content, "`"+reason+"`") {
			t.Errorf("reason %s: want advice, and a section %q of %s with the reason", reason, a.section, troubleshooting)
		}
		if !slices.Contains(reasons, reason) {
			t.Errorf("reason %s does not exist in the API", reason)
		}
	}
	for _, kind := range []string{"Paused", "Deleting"} {
		if a := adviceFor(kind, ""); sections[a.section] == "" {
			t.Errorf("condition %s: no section %q", kind, a.section)
		}
	}
}

// reasonsOfAPI returns the values of all constants whose name ends in Reason.
func reasonsOfAPI(t *testing.T) (reasons []string) {
	t.Helper()
	files, err := filepath.Glob("../../../api/*/v1beta2/*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || len(spec.Values) != 1 || !strings.HasSuffix(spec.Names[0].Name, "Reason") {
				return true
			}
			if literal, ok := spec.Values[0].(*ast.BasicLit); ok {
				reason, err := strconv.Unquote(literal.Value)
				if err != nil {
					t.Fatal(err)
				}
				reasons = append(reasons, reason)
			}
			return true
		})
	}
	slices.Sort(reasons)
	return slices.Compact(reasons)
}
