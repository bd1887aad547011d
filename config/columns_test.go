package config_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"

	"capstan.dev/capstan/internal/testenv/testcrds"
)

// columns contains the columns of every kind, as kubectl shows them. The first ones show whether an object works and to
// which cluster it belongs.
var columns = map[string][]string{
	"CapstanCluster":              {"Cluster", "Ready", "Reason", "Provisioned", "Endpoint", "Port", "Network", "Paused", "Age"},
	"CapstanClusterTemplate":      {"Age"},
	"CapstanConfig":               {"Cluster", "Role", "Data secret", "Ready", "Reason", "Paused", "Age"},
	"CapstanConfigTemplate":       {"Age"},
	"CapstanControlPlane":         {"Cluster", "Available", "Reason", "Initialized", "Desired", "Current", "Ready", "Up-to-date", "Updating", "Paused", "Age", "Version"},
	"CapstanControlPlaneTemplate": {"Age"},
	"CapstanHost":                 {"Ready", "Reason", "Domain", "Machines", "Memory", "Free", "Disk", "Versions", "Capstand", "Kernel", "Address", "Paused", "Age"},
	"CapstanIPPool":               {"Ready", "Total", "Used", "Free", "Waiting", "Out Of Range", "Reason", "Paused", "Age"},
	"CapstanMachine":              {"Cluster", "Machine", "Ready", "Reason", "Updating", "Host", "Address", "ProviderID", "Restarts", "Paused", "Age"},
	"CapstanMachinePool":          {"Cluster", "MachinePool", "Ready", "Reason", "Replicas", "Available", "Up-to-date", "ProviderID", "Paused", "Age"},
	"CapstanMachinePoolTemplate":  {"CPU", "Memory", "Age"},
	"CapstanMachineTemplate":      {"CPU", "Memory", "Age"},
	"CapstanVolume":               {"Cluster", "Owner", "Host", "GiB", "State", "Machine", "Paused", "Age"},
	"EtcdBackup":                  {"Trigger", "Phase", "Size", "Member", "Location", "Age"},
	"EtcdBackupCheck":             {"Backup", "Phase", "Message", "Member", "Age"},
	"EtcdMember":                  {"Joined", "Healthy", "Leader", "Learner", "Leave", "Size", "Used", "Version", "ID", "Peer", "Age"},
	"GlobalCapstanIPPool":         {"Ready", "Total", "Used", "Free", "Waiting", "Out Of Range", "Reason", "Paused", "Age"},
}

// ALL-06: every kind has these columns, by name and in order, and each column shows a field of the schema.
func TestPrinterColumns_ALL06(t *testing.T) {
	crds := append(testcrds.All(t), testcrds.In(t, os.DirFS("../internal/node/provision/manifests"), "etcd.capstan.dev_*.yaml")...)
	if len(crds) != len(columns) {
		t.Errorf("%d CRDs, columns of %d kinds", len(crds), len(columns))
	}
	for _, crd := range crds {
		kind := crd.Spec.Names.Kind
		for _, version := range crd.Spec.Versions {
			var names []string
			for _, c := range version.AdditionalPrinterColumns {
				names = append(names, c.Name)
				if c.Description == "" {
					t.Errorf("%s: the column %s is not described", kind, c.Name)
				}
				if missing := missingField(version.Schema.OpenAPIV3Schema, c.JSONPath); missing != "" {
					t.Errorf("%s: the column %s shows %s, but there is no field %s", kind, c.Name, c.JSONPath, missing)
				}
			}
			if version.Name == "v1beta2" && !slices.Equal(names, columns[kind]) {
				t.Errorf("%s has the columns %q, want %q", kind, names, columns[kind])
			}
		}
	}
}

// filter is the part of a JSONPath that selects items of a list.
var filter = regexp.MustCompile(`\[[^\]]*\]`)

// missingField returns the first field of a JSONPath that a schema does not have, or "". It ignores metadata, which
// Kubernetes defines, and the keys of maps.
func missingField(schema *apiextensionsv1.JSONSchemaProps, path string) string {
	for name := range strings.SplitSeq(strings.Trim(filter.ReplaceAllString(path, ""), "."), ".") {
		if schema.Items != nil && schema.Items.Schema != nil {
			schema = schema.Items.Schema
		}
		if schema.AdditionalProperties != nil {
			return ""
		}
		next, ok := schema.Properties[name]
		if !ok {
			return name
		}
		if name == "metadata" {
			return ""
		}
		schema = &next
	}
	return ""
}
