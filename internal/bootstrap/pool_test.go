package bootstrap

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

// Pools replace their machines when the name changes. If a release of Capstan changed the name, it would replace every machine of
// every pool.
func TestPoolSecretNameStaysTheSame(t *testing.T) {
	config := &bootstrapv1.CapstanConfig{ObjectMeta: metav1.ObjectMeta{Name: "demo"}}
	if got, want := poolSecretName(config, "v1.36.3"), "demo-7a815388"; got != want {
		t.Errorf("without a spec %s, was %s", got, want)
	}
	config.Spec = bootstrapv1.CapstanConfigSpec{
		Kubelet:     bootstrapv1.KubeletSpec{ExtraArgs: []bootstrapv1.Arg{{Name: "max-pods", Value: "100"}}},
		Node:        bootstrapv1.NodeSpec{Labels: map[string]string{"tier": "one", "a": "b"}, Taints: &[]bootstrapv1.Taint{}},
		Files:       []bootstrapv1.File{{Path: "/etc/motd", Permissions: "0644", Content: "hello", Append: ptr.To(true)}},
		PreCommands: []string{"true"},
	}
	if got, want := poolSecretName(config, "v1.36.3"), "demo-9937efed"; got != want {
		t.Errorf("%s, was %s", got, want)
	}
	if poolSecretName(config, "v1.36.3") == poolSecretName(config, "v1.36.4") {
		t.Error("two versions have the same name")
	}
}
