package provision

import (
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/node/nodeconfig"
)

// The user's arguments and policy replace the defaults from the CIS benchmark.
func TestUserOverridesHardening(t *testing.T) {
	n := testNode(nodeconfig.RoleInit, func(c *nodeconfig.NodeConfiguration) {
		c.ControlPlane.AuditPolicy = true
		c.ControlPlane.APIServer.ExtraArgs = []nodeconfig.Arg{arg("enable-admission-plugins", "NodeRestriction"), arg("profiling", "true"), arg("audit-log-maxbackup", "2")}
		c.ControlPlane.ControllerManager.ExtraArgs = []nodeconfig.Arg{arg("terminated-pod-gc-threshold", "12500")}
	})
	want := map[string][]string{
		"kube-apiserver": {"--enable-admission-plugins=NodeRestriction", "--profiling=true", "--audit-log-maxbackup=2",
			"--audit-policy-file=" + nodeconfig.AuditPolicyPath, "--audit-log-maxage=30"},
		"kube-controller-manager": {"--terminated-pod-gc-threshold=12500", "--profiling=false"},
	}
	for _, s := range n.controlPlaneServices() {
		for _, argument := range want[s.Name] {
			name, _, _ := strings.Cut(argument, "=")
			var found []string
			for _, a := range s.Command {
				if strings.HasPrefix(a, name+"=") {
					found = append(found, a)
				}
			}
			if !slices.Equal(found, []string{argument}) {
				t.Errorf("%s: %v, want only %s", s.Name, found, argument)
			}
		}
	}
}

// A level above Metadata would log request bodies, which contain Secrets.
func TestAuditPolicy(t *testing.T) {
	var policy struct {
		Kind  string
		Rules []struct {
			Level     string
			Users     []string
			Resources []struct{ Resources []string }
		}
	}
	if err := yaml.Unmarshal(auditPolicy, &policy); err != nil {
		t.Fatal(err)
	}
	secrets := false
	for i, rule := range policy.Rules {
		if rule.Level != "None" && rule.Level != "Metadata" {
			t.Errorf("rule %d has level %q", i, rule.Level)
		}
		for _, r := range rule.Resources {
			secrets = secrets || rule.Level == "Metadata" && slices.Contains(r.Resources, "secrets")
		}
		if rule.Level == "None" && !secrets && rule.Resources != nil {
			t.Errorf("rule %d excludes resources before the rule that logs Secrets", i)
		}
	}
	if policy.Kind != "Policy" || !secrets || policy.Rules[len(policy.Rules)-1].Level != "Metadata" {
		t.Errorf("policy of kind %q, secrets logged: %v, last rule %+v", policy.Kind, secrets, policy.Rules[len(policy.Rules)-1])
	}
}

// The kubelet gets --hostname-override only if its name differs from the machine's host name.
func TestHostnameOverride(t *testing.T) {
	n := testNode(nodeconfig.RoleWorker, nil)
	for hostname, want := range map[string]string{"m": "", "elsewhere": "m"} {
		n.hostname = hostname
		if got := valueOf(n.kubeletArgs().with("kubelet", nil), "hostname-override"); got != want {
			t.Errorf("host name %s: --hostname-override=%q, want %q", hostname, got, want)
		}
	}
}
