package config_test

import (
	"bytes"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/version"
	apiversion "k8s.io/apimachinery/pkg/version"
	clusterctlv1 "sigs.k8s.io/cluster-api/cmd/clusterctl/api/v1alpha3"
	"sigs.k8s.io/cluster-api/cmd/clusterctl/client/yamlprocessor"
	"sigs.k8s.io/cluster-api/util/contract"
	"sigs.k8s.io/yaml"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/manifest"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/templates"
)

// The version and the folder of the release under test.
const releaseVersion = "v0.1.0"

var dist string

// kindOf contains clusterctl's type of the provider for each folder of config/.
var kindOf = map[string]clusterctlv1.ProviderType{
	"infrastructure": clusterctlv1.InfrastructureProviderType,
	"control-plane":  clusterctlv1.ControlPlaneProviderType,
	"bootstrap":      clusterctlv1.BootstrapProviderType,
	"ipam":           clusterctlv1.IPAMProviderType,
}

func TestMain(m *testing.M) {
	os.Exit(func() int {
		folder, err := os.MkdirTemp("", "capstan-release-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(folder)
		dist = folder
		for _, what := range []string{"manifests", "checksums"} {
			if out, err := release(what, releaseVersion, dist); err != nil {
				fmt.Fprintf(os.Stderr, "%s: %v\n%s", what, err, out)
				return 1
			}
		}
		return m.Run()
	}())
}

// release runs hack/release.sh.
func release(what, version, folder string) (string, error) {
	cmd := exec.Command(filepath.Join(testenv.Root(), "hack", "release.sh"), what, version, folder)
	if assets := os.Getenv("KUBEBUILDER_ASSETS"); assets != "" {
		cmd.Env = append(os.Environ(), "KUBECTL="+filepath.Join(assets, "kubectl"))
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func asset(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dist, "assets", releaseVersion, name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// assets returns the assets whose name matches.
func assets(t *testing.T, pattern string) []string {
	t.Helper()
	names, err := fs.Glob(os.DirFS(filepath.Join(dist, "assets", releaseVersion)), pattern)
	if err != nil || len(names) == 0 {
		t.Fatalf("no asset %s: %v", pattern, err)
	}
	return names
}

// process replaces variables like clusterctl.
func process(t *testing.T, data []byte, given map[string]string) []*unstructured.Unstructured {
	t.Helper()
	data, err := yamlprocessor.NewSimpleProcessor().Process(data, func(name string) (string, error) {
		if value, ok := given[name]; ok {
			return value, nil
		}
		return "", fmt.Errorf("%s is not set", name)
	})
	if err != nil {
		t.Fatal(err)
	}
	objects, err := manifest.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	return objects
}

// parsed contains the objects of each provider after their first use: most of them are CRDs, and to parse these is slow.
var parsed = map[string][]*unstructured.Unstructured{}

// components returns the objects of a provider, with the defaults of all variables. The caller may change them.
func components(t *testing.T, provider string) []*unstructured.Unstructured {
	t.Helper()
	if parsed[provider] == nil {
		parsed[provider] = process(t, asset(t, provider+"-components.yaml"), nil)
	}
	objects := make([]*unstructured.Unstructured, len(parsed[provider]))
	for i, o := range parsed[provider] {
		objects[i] = o.DeepCopy()
	}
	return objects
}

func typed[T any](t *testing.T, o *unstructured.Unstructured) T {
	t.Helper()
	var into T
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(o.Object, &into, true); err != nil {
		t.Fatalf("%s %s: %v", o.GetKind(), o.GetName(), err)
	}
	return into
}

func ofKind[T any](t *testing.T, objects []*unstructured.Unstructured, kind string) []T {
	t.Helper()
	var found []T
	for _, o := range objects {
		if o.GetKind() == kind {
			found = append(found, typed[T](t, o))
		}
	}
	return found
}

// providers returns the components of all providers.
func providers(t *testing.T) map[string][]*unstructured.Unstructured {
	t.Helper()
	all := map[string][]*unstructured.Unstructured{}
	for provider := range kindOf {
		all[provider] = components(t, provider)
	}
	return all
}

// CTL-01, CTL-02, CTL-04, CTL-09, CTL-10: the repository contains exactly the files that clusterctl reads, in the
// expected places.
func TestRepository(t *testing.T) {
	var want []string
	for provider, kind := range kindOf {
		folder := clusterctlv1.ManifestLabel("capstan", kind) + "/" + releaseVersion + "/"
		want = append(want, folder+"metadata.yaml", folder+provider+"-components.yaml")
	}
	infrastructure := "infrastructure-capstan/" + releaseVersion + "/"
	for _, pattern := range []string{"cluster-template*.yaml", "clusterclass-*.yaml"} {
		files, err := fs.Glob(templates.FS, pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			want = append(want, infrastructure+file)
		}
	}
	var found []string
	repository := os.DirFS(filepath.Join(dist, "repository"))
	err := fs.WalkDir(repository, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasPrefix(path, "cluster-api/") {
			return err
		}
		found = append(found, path)
		data, err := fs.ReadFile(repository, path)
		if err != nil {
			return err
		}
		if !bytes.Equal(data, asset(t, filepath.Base(path))) {
			t.Errorf("%s is not the asset of that name", path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(want)
	if !slices.Equal(want, found) {
		t.Errorf("want\n  %s\ngot\n  %s", strings.Join(want, "\n  "), strings.Join(found, "\n  "))
	}
}

// CTL-02: a version that is not semantic or has no release series is refused before any file is written.
func TestVersionIsRefused(t *testing.T) {
	for version, reason := range map[string]string{
		"0.1.0": "must be a semantic version", "v1": "must be a semantic version", "v01.0.0": "must be a semantic version",
		"v0.1.0;x": "must be a semantic version", "v7.0.0": "has no release series 7.0", "v0.11.0": "has no release series 0.11",
	} {
		folder := filepath.Join(t.TempDir(), "dist")
		out, err := release("manifests", version, folder)
		if err == nil || !strings.Contains(out, reason) {
			t.Errorf("%s: %v, %s", version, err, out)
		}
		if _, err := os.Stat(folder); err == nil {
			t.Errorf("%s: the folder was created", version)
		}
	}
}

// The checksums file contains all assets.
func TestChecksums(t *testing.T) {
	cmd := exec.Command("sha256sum", "--check", "--strict", "SHA256SUMS")
	cmd.Dir = filepath.Join(dist, "assets", releaseVersion)
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Count(string(out), ": OK") != len(assets(t, "*"))-1 {
		t.Errorf("%v: %s", err, out)
	}
}

// TestSignature: gpg accepts the checksums of a release that was built with a key, and refuses changed ones.
func TestSignature(t *testing.T) {
	t.Setenv("GNUPGHOME", t.TempDir())
	folder := t.TempDir()
	must := func(name string, args ...string) {
		t.Helper()
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
	}
	must("gpg", "--batch", "--passphrase", "", "--quick-generate-key", "release@example.org", "ed25519", "sign", "never")
	t.Cleanup(func() { must("gpgconf", "--kill", "all") })
	assets := filepath.Join(folder, "assets", releaseVersion)
	must("mkdir", "-p", assets)
	if err := os.WriteFile(filepath.Join(assets, "file"), []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SIGNING_KEY", "release@example.org")
	if out, err := release("checksums", releaseVersion, folder); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	sums := filepath.Join(assets, "SHA256SUMS")
	must("gpg", "--verify", sums+".asc", sums)
	if err := os.WriteFile(sums, []byte("0000  file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := exec.Command("gpg", "--verify", sums+".asc", sums).Run(); err == nil {
		t.Error("gpg accepts changed checksums")
	}
}

// CTL-03: the series of the release has the newest contract with which all CRDs are labelled. clusterctl reads only the
// first entry of a series.
func TestMetadata(t *testing.T) {
	metadata := clusterctlv1.Metadata{}
	if err := yaml.UnmarshalStrict(asset(t, "metadata.yaml"), &metadata); err != nil {
		t.Fatal(err)
	}
	if metadata.GroupVersionKind() != clusterctlv1.GroupVersion.WithKind("Metadata") {
		t.Errorf("metadata.yaml is a %s", metadata.GroupVersionKind())
	}
	contracts := map[string]string{}
	for _, series := range metadata.ReleaseSeries {
		name := fmt.Sprintf("%d.%d", series.Major, series.Minor)
		if contracts[name] != "" {
			t.Errorf("the series %s has a second entry, which clusterctl does not read", name)
		}
		contracts[name] = series.Contract
	}
	release := version.MustParseSemantic(releaseVersion)
	got := contracts[fmt.Sprintf("%d.%d", release.Major(), release.Minor())]
	for _, objects := range providers(t) {
		for _, crd := range ofKind[apiextensionsv1.CustomResourceDefinition](t, objects, "CustomResourceDefinition") {
			if want := newestContract(crd.Labels); got != want {
				t.Errorf("metadata.yaml assigns the contract %q to %s, and %s is labelled for %q", got, releaseVersion, crd.Name, want)
			}
		}
	}
}

// newestContract returns the newest version of the contract in the labels of a CRD.
func newestContract(labels map[string]string) (newest string) {
	for label := range labels {
		v, ok := strings.CutPrefix(label, "cluster.x-k8s.io/")
		if ok && strings.HasPrefix(v, "v1") && (newest == "" || apiversion.CompareKubeAwareVersionStrings(v, newest) > 0) {
			newest = v
		}
	}
	return newest
}

// ALL-03, ALL-04: names and labels of the CRDs are those that Cluster API computes and reads.
func TestCRDs(t *testing.T) {
	for _, objects := range providers(t) {
		crds := ofKind[apiextensionsv1.CustomResourceDefinition](t, objects, "CustomResourceDefinition")
		if len(crds) == 0 {
			t.Error("no CRD")
		}
		for _, crd := range crds {
			if want := contract.CalculateCRDName(crd.Spec.Group, crd.Spec.Names.Kind); crd.Name != want {
				t.Errorf("CRD %s, want %s", crd.Name, want)
			}
			checkConversion(t, crd)
			var served []string
			for _, v := range crd.Spec.Versions {
				if v.Served {
					served = append(served, v.Name)
				}
			}
			for label, versions := range crd.Labels {
				contractVersion, ok := strings.CutPrefix(label, "cluster.x-k8s.io/v1")
				if !ok || contractVersion == "" {
					continue
				}
				for v := range strings.SplitSeq(versions, "_") {
					if !slices.Contains(served, v) {
						t.Errorf("%s is labelled with %s=%s, and serves %v", crd.Name, label, versions, served)
					}
				}
			}
		}
	}
}

// ALL-05: the control plane provider gets the rights on the objects of all infrastructure providers. It does not get the
// roles of core and of other kinds of providers, which have the same label.
func TestControlPlaneGetsInfrastructureOnly_ALL05(t *testing.T) {
	selects := func(set labels.Set) (selected bool) {
		for _, role := range ofKind[rbacv1.ClusterRole](t, providers(t)["control-plane"], "ClusterRole") {
			if role.AggregationRule == nil {
				continue
			}
			for i := range role.AggregationRule.ClusterRoleSelectors {
				selector, err := metav1.LabelSelectorAsSelector(&role.AggregationRule.ClusterRoleSelectors[i])
				if err != nil {
					t.Fatal(err)
				}
				selected = selected || selector.Matches(set)
			}
		}
		return selected
	}
	for provider, want := range map[string]bool{
		"": true, "infrastructure-capstan": true, "infrastructure-docker": true, "infrastructure-anything": true,
		"cluster-api": false, "control-plane-kubeadm": false, "control-plane-capstan": false, "bootstrap-kubeadm": false, "bootstrap-capstan": false, "ipam-in-cluster": false,
	} {
		set := labels.Set{"cluster.x-k8s.io/aggregate-to-manager": "true"}
		if provider != "" {
			set["cluster.x-k8s.io/provider"] = provider
		}
		if selects(set) != want {
			t.Errorf("the role of %q is aggregated: %v", provider, !want)
		}
	}
	if selects(labels.Set{"cluster.x-k8s.io/provider": "infrastructure-docker"}) {
		t.Error("a role without the label aggregate-to-manager is aggregated")
	}
}

// checkConversion: the manager converts kinds with several versions, with a certificate from cert-manager.
func checkConversion(t *testing.T, crd apiextensionsv1.CustomResourceDefinition) {
	t.Helper()
	if len(crd.Spec.Versions) == 1 {
		return
	}
	provider, _, _ := strings.Cut(crd.Annotations["cert-manager.io/inject-ca-from"], "-system/")
	c := crd.Spec.Conversion
	if c == nil || c.Strategy != apiextensionsv1.WebhookConverter || !slices.Equal(c.Webhook.ConversionReviewVersions, []string{"v1"}) {
		t.Fatalf("%s: conversion %+v", crd.Name, c)
	}
	service := c.Webhook.ClientConfig.Service
	if service == nil || service.Name != provider+"-webhook-service" || service.Namespace != provider+"-system" || *service.Path != "/convert" ||
		provider != "capstan-"+crd.Labels["cluster.x-k8s.io/provider"][:strings.LastIndex(crd.Labels["cluster.x-k8s.io/provider"], "-")] {
		t.Errorf("%s: conversion by %+v of %s", crd.Name, service, provider)
	}
}

// ALL-05: core gets its rights on every kind that it uses, and only on those.
func TestAggregatedRoles_ALL05(t *testing.T) {
	for provider, objects := range providers(t) {
		if provider == "ipam" {
			continue // Core does not use pools.
		}
		var rules []rbacv1.PolicyRule
		for _, role := range ofKind[rbacv1.ClusterRole](t, objects, "ClusterRole") {
			if role.Labels["cluster.x-k8s.io/aggregate-to-manager"] == "true" {
				rules = append(rules, role.Rules...)
			}
		}
		may := func(group, resource, verb string) bool {
			return slices.ContainsFunc(rules, func(r rbacv1.PolicyRule) bool {
				return slices.Contains(r.APIGroups, group) && slices.Contains(r.Resources, resource) && slices.Contains(r.Verbs, verb)
			})
		}
		used := map[string]bool{}
		for _, crd := range ofKind[apiextensionsv1.CustomResourceDefinition](t, objects, "CustomResourceDefinition") {
			if crd.Spec.Scope == apiextensionsv1.ClusterScoped || !slices.Contains(crd.Spec.Names.Categories, "cluster-api") {
				continue // Core does not use hosts and volumes.
			}
			kind := crd.Spec.Group + " " + crd.Spec.Names.Plural
			used[kind], used[kind+"/finalizers"] = true, true
			for _, verb := range []string{"create", "delete", "get", "list", "patch", "update", "watch"} {
				if !may(crd.Spec.Group, crd.Spec.Names.Plural, verb) {
					t.Errorf("core may not %s %s", verb, crd.Name)
				}
			}
			if !may(crd.Spec.Group, crd.Spec.Names.Plural+"/finalizers", "update") {
				t.Errorf("core may not update finalizers of %s", crd.Name)
			}
		}
		for _, rule := range rules {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					if !used[group+" "+resource] {
						t.Errorf("core may %v %s of the group %s, which it does not use", rule.Verbs, resource, group)
					}
				}
			}
		}
	}
}

// Providers have only the rights that they use. They patch objects. The exceptions that use update are listed here. They only read
// Clusters, and have no right on the parts of a Cluster (IC-13). Wildcards are only used for the kinds of other infrastructure providers, which are unknown here.
func TestRoles_IC13(t *testing.T) {
	updated := []string{
		"leases", "capstanippools/status", "globalcapstanippools/status",
		"ipaddressclaims", "ipaddresses", // the removal of the last finalizer: only an update checks the UID
	}
	for provider, objects := range providers(t) {
		var rules []rbacv1.PolicyRule
		for _, role := range ofKind[rbacv1.ClusterRole](t, objects, "ClusterRole") {
			if role.Labels["cluster.x-k8s.io/aggregate-to-manager"] == "" { // Core defines this kind.
				rules = append(rules, role.Rules...)
			}
		}
		for _, role := range ofKind[rbacv1.Role](t, objects, "Role") {
			rules = append(rules, role.Rules...)
		}
		if len(rules) == 0 {
			t.Errorf("%s: no rules", provider)
		}
		for _, rule := range rules {
			foreign := slices.Equal(rule.APIGroups, []string{"infrastructure.cluster.x-k8s.io"}) && provider == "control-plane"
			if slices.Contains(rule.APIGroups, "*") || slices.Contains(rule.Verbs, "*") || slices.Contains(rule.Resources, "*") && !foreign {
				t.Errorf("%s: a wildcard in %v", provider, rule)
			}
			if slices.Contains(rule.Verbs, "escalate") || slices.Contains(rule.Verbs, "impersonate") || slices.Contains(rule.Verbs, "deletecollection") {
				t.Errorf("%s: %v", provider, rule)
			}
			for _, resource := range rule.Resources {
				if beyondReading(rule, resource) {
					t.Errorf("%s may %v %s", provider, rule.Verbs, resource)
				}
				if slices.Contains(rule.Verbs, "update") && !strings.HasSuffix(resource, "/finalizers") && !slices.Contains(updated, resource) {
					t.Errorf("%s may update %s as a whole", provider, resource)
				}
			}
		}
	}
}

// beyondReading reports whether a rule permits more than to read Clusters.
func beyondReading(rule rbacv1.PolicyRule, resource string) bool {
	if !slices.Contains(rule.APIGroups, "cluster.x-k8s.io") {
		return false
	}
	return strings.HasPrefix(resource, "clusters/") || resource == "clusters" && slices.ContainsFunc(rule.Verbs, func(verb string) bool {
		return !slices.Contains([]string{"get", "list", "watch"}, verb)
	})
}

// ALL-11, CTL-13: the kinds that exist without a Cluster have the label for `clusterctl move` that their place in the graph of objects
// requires, and no other kind has one. Row CTL-12. Their hierarchy moves with a host (its Secrets) and a pool (its addresses). A volume
// has no hierarchy. The addresses of a global pool belong to their claims, and would stay at the source as its hierarchy.
func TestMoveLabels_ALL11(t *testing.T) {
	want := map[string]string{
		"CapstanHost": clusterctlv1.ClusterctlMoveHierarchyLabel, "CapstanVolume": clusterctlv1.ClusterctlMoveLabel,
		"CapstanIPPool": clusterctlv1.ClusterctlMoveHierarchyLabel, "GlobalCapstanIPPool": clusterctlv1.ClusterctlMoveLabel,
	}
	for _, objects := range providers(t) {
		for _, crd := range ofKind[apiextensionsv1.CustomResourceDefinition](t, objects, "CustomResourceDefinition") {
			for _, label := range []string{clusterctlv1.ClusterctlMoveLabel, clusterctlv1.ClusterctlMoveHierarchyLabel} {
				if _, has := crd.Labels[label]; has != (want[crd.Spec.Names.Kind] == label) {
					t.Errorf("%s has the label %s: %v", crd.Name, label, has)
				}
			}
			delete(want, crd.Spec.Names.Kind)
		}
	}
	if len(want) > 0 {
		t.Errorf("no CRD of %v", slices.Sorted(maps.Keys(want)))
	}
}

// TestMovePage_CTL16: the page about moves names each kind that no Cluster owns, and the labels with which clusterctl moves the others.
func TestMovePage_CTL16(t *testing.T) {
	text, kinds := page(t, "move.md"), 0
	for _, objects := range providers(t) {
		for _, crd := range ofKind[apiextensionsv1.CustomResourceDefinition](t, objects, "CustomResourceDefinition") {
			for _, label := range []string{clusterctlv1.ClusterctlMoveLabel, clusterctlv1.ClusterctlMoveHierarchyLabel} {
				if _, has := crd.Labels[label]; !has {
					continue
				}
				if kinds++; !strings.Contains(text, crd.Spec.Names.Kind) {
					t.Errorf("docs/move.md does not contain %s, which has the label %s", crd.Spec.Names.Kind, label)
				}
			}
		}
	}
	if kinds < 4 {
		t.Errorf("%d kinds have a label for moves, want at least 4", kinds)
	}
	for _, step := range []string{"clusterctl move --", clusterctlv1.ClusterctlMoveLabel, "## Preparation", "## Clean-up"} {
		if !strings.Contains(text, step) {
			t.Errorf("docs/move.md does not contain %q", step)
		}
	}
}

// CTL-05: there is one Namespace, and every namespaced object is in it.
func TestNamespace_CTL05(t *testing.T) {
	clusterWide := []string{
		"Namespace", "CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding",
		"ValidatingWebhookConfiguration", "MutatingWebhookConfiguration",
		"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
	}
	for provider, objects := range providers(t) {
		namespaces := ofKind[corev1.Namespace](t, objects, "Namespace")
		if len(namespaces) != 1 || namespaces[0].Name != "capstan-"+provider+"-system" {
			t.Fatalf("Namespaces: %v", namespaces)
		}
		for _, o := range objects {
			want := namespaces[0].Name
			if slices.Contains(clusterWide, o.GetKind()) {
				want = ""
			}
			if o.GetNamespace() != want {
				t.Errorf("%s %s is in the namespace %q, want %q", o.GetKind(), o.GetName(), o.GetNamespace(), want)
			}
		}
	}
}

// CTL-06: there is one Deployment. Its container `manager` runs the image of this release without privileges.
func TestDeployment_CTL06(t *testing.T) {
	for provider, objects := range providers(t) {
		deployments := ofKind[appsv1.Deployment](t, objects, "Deployment")
		if len(deployments) != 1 {
			t.Fatalf("%d Deployments", len(deployments))
		}
		pod := deployments[0].Spec.Template.Spec
		if len(pod.Containers) != 1 || pod.Containers[0].Name != "manager" {
			t.Fatalf("containers: %v", pod.Containers)
		}
		c := pod.Containers[0]
		if want := "registry.capstan.dev/manager:" + releaseVersion; c.Image != want {
			t.Errorf("image %s, want %s", c.Image, want)
		}
		if c.Args[0] != provider || !slices.Contains(c.Args, "--leader-elect") || slices.Contains(c.Args, "--namespace") {
			t.Errorf("arguments: %v", c.Args)
		}
		if c.LivenessProbe == nil || c.ReadinessProbe == nil {
			t.Error("no probes")
		}
		if pod.HostNetwork || pod.HostPID || len(c.SecurityContext.Capabilities.Add) > 0 || *c.SecurityContext.AllowPrivilegeEscalation ||
			!*pod.SecurityContext.RunAsNonRoot || !*c.SecurityContext.ReadOnlyRootFilesystem {
			t.Error("the manager has privileges that it does not need")
		}
	}
}

// A full or partly drained cluster keeps its managers, and only their ports are reachable.
func TestAvailability(t *testing.T) {
	for provider, objects := range providers(t) {
		pod := ofKind[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template
		container := pod.Spec.Containers[0]
		if container.Resources.Requests.Cpu().IsZero() || container.Resources.Requests.Memory().IsZero() || pod.Spec.PriorityClassName == "" {
			t.Errorf("%s: requests %v, priority class %q", provider, container.Resources.Requests, pod.Spec.PriorityClassName)
		}
		if spread := pod.Spec.TopologySpreadConstraints; len(spread) != 1 || spread[0].TopologyKey != corev1.LabelHostname || !maps.Equal(spread[0].LabelSelector.MatchLabels, pod.Labels) {
			t.Errorf("%s: spread by %+v", provider, spread)
		}
		if b := ofKind[policyv1.PodDisruptionBudget](t, objects, "PodDisruptionBudget"); len(b) != 1 || !maps.Equal(b[0].Spec.Selector.MatchLabels, pod.Labels) || b[0].Spec.MaxUnavailable.IntValue() != 1 {
			t.Errorf("%s: budgets %+v", provider, b)
		}
		policies := ofKind[networkingv1.NetworkPolicy](t, objects, "NetworkPolicy")
		if len(policies) != 1 || !maps.Equal(policies[0].Spec.PodSelector.MatchLabels, pod.Labels) {
			t.Fatalf("%s: policies %+v", provider, policies)
		}
		var open, want []string
		for _, p := range policies[0].Spec.Ingress[0].Ports {
			open = append(open, p.Port.String())
		}
		for _, p := range container.Ports {
			want = append(want, p.Name)
		}
		if slices.Sort(open); !slices.Equal(open, slices.Sorted(slices.Values(want))) {
			t.Errorf("%s: the policy opens %v, want the ports of the manager, %v", provider, open, want)
		}
	}
}

// With the documented addresses, a CNI that enforces NetworkPolicies lets hosts reach the manager that they dial, and Prometheus the
// metrics: the ports of these addresses have the names that the policy (TestAvailability) and the Service (TestMetricsAreReadable) use.
func TestPortsOfAddresses(t *testing.T) {
	for provider, objects := range providers(t) {
		container := ofKind[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec.Containers[0]
		has := func(name string, port int32) bool {
			return slices.ContainsFunc(container.Ports, func(p corev1.ContainerPort) bool { return p.Name == name && p.ContainerPort == port })
		}
		if !slices.Contains(container.Args, "--diagnostics-address=:8443") || !has("metrics", 8443) {
			t.Errorf("%s: the port of the metrics is not that of --diagnostics-address: %v, %v", provider, container.Args, container.Ports)
		}
		if dials := slices.Contains(container.Args, "--host-listen-address"); dials != (provider == "infrastructure") || has("hosts", 7444) != dials {
			t.Errorf("%s: hosts that dial need the port 7444: %v, %v", provider, container.Args, container.Ports)
		}
	}
}

// Prometheus finds the metrics with a Service, and one ClusterRole allows it to read them.
func TestMetricsAreReadable(t *testing.T) {
	for provider, objects := range providers(t) {
		container := ofKind[appsv1.Deployment](t, objects, "Deployment")[0].Spec.Template.Spec.Containers[0]
		if !slices.ContainsFunc(ofKind[corev1.Service](t, objects, "Service"), func(s corev1.Service) bool {
			return s.Name == "capstan-"+provider+"-metrics-service" && slices.ContainsFunc(container.Ports, func(p corev1.ContainerPort) bool {
				return p.Name == s.Spec.Ports[0].TargetPort.String() && p.Name == "metrics"
			})
		}) {
			t.Errorf("%s: no Service of the metrics", provider)
		}
		if !slices.ContainsFunc(ofKind[rbacv1.ClusterRole](t, objects, "ClusterRole"), func(r rbacv1.ClusterRole) bool {
			return r.Name == "capstan-"+provider+"-metrics-reader" && reflect.DeepEqual(r.Rules, []rbacv1.PolicyRule{{NonResourceURLs: []string{"/metrics"}, Verbs: []string{"get"}}})
		}) {
			t.Errorf("%s: no role for readers of the metrics", provider)
		}
	}
}

var variable = regexp.MustCompile(`\$\{[^}]*\}?`)

// CTL-07: every variable has the prefix CAPSTAN_ and a default, and is documented.
func TestVariablesOfComponents_CTL07(t *testing.T) {
	documentation := document(t)
	form := regexp.MustCompile(`^\$\{CAPSTAN_[A-Z0-9_]+:=[^$ {}]+\}$`)
	for provider := range providers(t) {
		for _, v := range variable.FindAllString(string(asset(t, provider+"-components.yaml")), -1) {
			if !form.MatchString(v) {
				t.Errorf("%s is not of the form ${CAPSTAN_NAME:=default}", v)
			}
			name, _, _ := strings.Cut(strings.TrimPrefix(v, "${"), ":=")
			if !strings.Contains(documentation, "`"+name+"`") {
				t.Errorf("docs/clusterctl.md does not contain %s", name)
			}
		}
	}
}

func document(t *testing.T) string {
	t.Helper()
	return page(t, "clusterctl.md")
}

// page returns a page of the documentation.
func page(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(testenv.Root(), "docs", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// CTL-08
func TestProviderLabel_CTL08(t *testing.T) {
	for provider, objects := range providers(t) {
		for _, o := range objects {
			if got, want := o.GetLabels()["cluster.x-k8s.io/provider"], clusterctlv1.ManifestLabel("capstan", kindOf[provider]); got != want {
				t.Errorf("%s %s is labelled %q, want %q", o.GetKind(), o.GetName(), got, want)
			}
		}
	}
}

// CTL-11: the names of the providers are valid, clusterctl accepts them, and no provider in clusterctl's own list has
// one of them. Only names in that list need the prefix <org>-.
func TestName_CTL11(t *testing.T) {
	name := regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	repositories, err := os.ReadDir(filepath.Join(dist, "repository"))
	if err != nil || len(repositories) != len(kindOf)+1 {
		t.Fatalf("%v, %v", repositories, err)
	}
	for _, r := range repositories {
		if !name.MatchString(r.Name()) {
			t.Errorf("%s is not a name of a provider", r.Name())
		}
	}
	own := configuration(t, func(provider string) string {
		return filepath.Join(dist, "repository", clusterctlv1.ManifestLabel("capstan", kindOf[provider]), "latest", provider+"-components.yaml")
	})
	empty := filepath.Join(t.TempDir(), "clusterctl.yaml")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for config, want := range map[string]int{empty: 0, own: len(kindOf)} {
		out, err := clusterctl(t, nil, "config", "repositories", "--config", config)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out, "kubeadm") {
			t.Fatalf("clusterctl does not print its own list:\n%s", out)
		}
		if got := len(regexp.MustCompile(`(?m)^capstan\s`).FindAllString(out, -1)); got != want {
			t.Errorf("clusterctl lists %d providers with the name capstan, want %d:\n%s", got, want, out)
		}
	}
}

// CTL-17: each file of components contains the objects that its objects reference.
func TestComponentsAreComplete_CTL17(t *testing.T) {
	for _, objects := range providers(t) {
		has := func(kind, name string) {
			t.Helper()
			if !slices.ContainsFunc(objects, func(o *unstructured.Unstructured) bool { return o.GetKind() == kind && o.GetName() == name }) {
				t.Errorf("no %s %s", kind, name)
			}
		}
		deployment := ofKind[appsv1.Deployment](t, objects, "Deployment")[0]
		has("ServiceAccount", deployment.Spec.Template.Spec.ServiceAccountName)
		for _, b := range ofKind[rbacv1.ClusterRoleBinding](t, objects, "ClusterRoleBinding") {
			has("ClusterRole", b.RoleRef.Name)
			if b.Name == infrav1.HostJoinServiceAccount { // The rights of join tokens are not those of the manager.
				has("ServiceAccount", b.Subjects[0].Name)
				continue
			}
			if b.Subjects[0].Name != deployment.Spec.Template.Spec.ServiceAccountName || b.Subjects[0].Namespace != deployment.Namespace {
				t.Errorf("%s is bound to %v", b.RoleRef.Name, b.Subjects)
			}
		}
		for _, b := range ofKind[rbacv1.RoleBinding](t, objects, "RoleBinding") {
			has("Role", b.RoleRef.Name)
		}
		services := ofKind[corev1.Service](t, objects, "Service")
		for _, s := range services {
			if !maps.Equal(s.Spec.Selector, deployment.Spec.Template.Labels) {
				t.Errorf("the Service %s selects %v", s.Name, s.Spec.Selector)
			}
		}
		service := services[slices.IndexFunc(services, func(s corev1.Service) bool { return strings.HasSuffix(s.Name, "-webhook-service") })]
		for _, o := range objects {
			switch o.GetKind() {
			case "Certificate":
				secret, _, _ := unstructured.NestedString(o.Object, "spec", "secretName")
				if secret != deployment.Spec.Template.Spec.Volumes[0].Secret.SecretName {
					t.Errorf("the manager does not mount the Secret %s", secret)
				}
				issuer, _, _ := unstructured.NestedString(o.Object, "spec", "issuerRef", "name")
				has("Issuer", issuer)
				names, _, _ := unstructured.NestedStringSlice(o.Object, "spec", "dnsNames")
				if !slices.Contains(names, service.Name+"."+service.Namespace+".svc") {
					t.Errorf("the certificate is for %v", names)
				}
			case "ValidatingWebhookConfiguration", "MutatingWebhookConfiguration":
				namespace, certificate, _ := strings.Cut(o.GetAnnotations()["cert-manager.io/inject-ca-from"], "/")
				has("Certificate", certificate)
				hooks, _, _ := unstructured.NestedSlice(o.Object, "webhooks")
				for _, hook := range hooks {
					name, _, _ := unstructured.NestedString(hook.(map[string]any), "clientConfig", "service", "name")
					in, _, _ := unstructured.NestedString(hook.(map[string]any), "clientConfig", "service", "namespace")
					if name != service.Name || in != service.Namespace || namespace != service.Namespace {
						t.Errorf("%s calls %s/%s with the CA of %s", o.GetName(), in, name, namespace)
					}
				}
			}
		}
	}
}

// The managers have no wildcard verbs, and no verb with which they can extend their own rights.
func TestLeastPrivilege(t *testing.T) {
	for provider, objects := range providers(t) {
		for _, role := range ofKind[rbacv1.ClusterRole](t, objects, "ClusterRole") {
			for _, rule := range role.Rules {
				for _, verb := range rule.Verbs {
					if slices.Contains([]string{"*", "bind", "escalate", "impersonate", "deletecollection"}, verb) {
						t.Errorf("%s: %s on %v", role.Name, verb, rule.Resources)
					}
				}
				if slices.Contains(rule.APIGroups, "*") || slices.Contains(rule.APIGroups, "rbac.authorization.k8s.io") {
					t.Errorf("%s: groups %v", role.Name, rule.APIGroups)
				}
				// A control plane provider creates machines of unknown infrastructure providers.
				if slices.Contains(rule.Resources, "*") && provider != "control-plane" {
					t.Errorf("%s: all resources of %v", role.Name, rule.APIGroups)
				}
			}
		}
	}
}
