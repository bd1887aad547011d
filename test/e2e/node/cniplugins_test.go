//go:build e2e

package node

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"capstan.dev/capstan/internal/testenv/expect"
)

// pluginsIn is the folder of the standard CNI plugins in a machine.
const pluginsIn = "/opt/capstan/node/cni/"

// testPlugins: docs/networking.md lists each standard CNI plugin of a machine. A chain of bridge, tuning and bandwidth and an
// interface with macvlan work. The kernel of the tests lacks vlan, ipvlan and vrf.
func testPlugins(t *testing.T, _, worker *host) {
	documented := documentedPlugins(t)
	shipped, err := worker.exec("/bin/ls", pluginsIn)
	expect.NoError(t, err)
	if !slices.Equal(strings.Fields(shipped), documented) {
		t.Errorf("machines have the plugins %q, docs/networking.md lists %q", strings.Fields(shipped), documented)
	}
	for _, plugin := range documented {
		var version struct{ SupportedVersions []string }
		expect.NoError(t, json.Unmarshal([]byte(worker.plugin(t, "VERSION", plugin, map[string]any{})), &version))
		if !slices.Contains(version.SupportedVersions, "1.0.0") {
			t.Errorf("%s supports CNI %q", plugin, version.SupportedVersions)
		}
	}

	_, err = worker.exec("/bin/ip", "netns", "add", "plugins")
	expect.NoError(t, err)
	var result json.RawMessage
	chain := []map[string]any{
		{"type": "bridge", "bridge": "cni-test", "ipam": map[string]any{"type": "host-local", "dataDir": "/run/cni-test", "subnet": "10.99.0.0/24"}},
		{"type": "tuning", "mtu": 1400},
		{"type": "bandwidth", "ingressRate": 1 << 20, "ingressBurst": 1 << 20, "egressRate": 1 << 20, "egressBurst": 1 << 20},
	}
	for _, config := range chain {
		if result != nil {
			config["prevResult"] = result
		}
		result = json.RawMessage(worker.plugin(t, "ADD", config["type"].(string), config))
	}
	for command, want := range map[string]string{
		"ip -n plugins address show eth9": "10.99.0.2/24", "ip -n plugins link show eth9": "mtu 1400", "tc qdisc show": "tbf",
	} {
		if out, err := worker.exec("/bin/sh", "-c", command); err != nil || !strings.Contains(out, want) {
			t.Errorf("%s: %q, %v, want %s", command, out, err, want)
		}
	}
	for _, config := range slices.Backward(chain) {
		config["prevResult"] = result
		worker.plugin(t, "DEL", config["type"].(string), config)
	}
	macvlan := map[string]any{"type": "macvlan", "master": "eth0", "ipam": map[string]any{
		"type": "static", "addresses": []any{map[string]any{"address": "10.77.0.99/24"}},
	}}
	worker.plugin(t, "ADD", "macvlan", macvlan)
	if out, err := worker.exec("/bin/sh", "-c", "ip -n plugins -d address show eth9"); err != nil || !strings.Contains(out, "macvlan") || !strings.Contains(out, "10.77.0.99/24") {
		t.Errorf("macvlan: %q, %v", out, err)
	}
	worker.plugin(t, "DEL", "macvlan", macvlan)
	_, err = worker.exec("/bin/sh", "-c", "ip netns delete plugins && ip link delete cni-test")
	expect.NoError(t, err)
}

// plugin calls a plugin for the interface eth9 of the network namespace "plugins" of the machine.
func (h *host) plugin(t *testing.T, command, plugin string, config map[string]any) string {
	t.Helper()
	config["cniVersion"], config["name"] = "1.0.0", "test"
	input, err := json.Marshal(config)
	expect.NoError(t, err)
	out, err := h.execInput(string(input), "/usr/bin/env", "CNI_COMMAND="+command, "CNI_CONTAINERID=test", "CNI_NETNS=/run/netns/plugins",
		"CNI_IFNAME=eth9", "CNI_PATH="+pluginsIn, pluginsIn+plugin)
	if err != nil {
		t.Fatalf("%s of %s: %v\n%s", command, plugin, err, out)
	}
	return out
}

// documentedPlugins reads the table of docs/networking.md.
func documentedPlugins(t *testing.T) (names []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "networking.md"))
	expect.NoError(t, err)
	_, table, _ := strings.Cut(string(text), "| kind | plugins |\n| --- | --- |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	for i, part := range strings.Split(table, "`") {
		if i%2 == 1 {
			names = append(names, part)
		}
	}
	slices.Sort(names)
	return names
}
