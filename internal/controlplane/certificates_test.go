package controlplane

import (
	"context"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
)

// TestUncertified (CP-14, CP-15): a Secret with keys is missing. Machines can still be removed, changes still reach the other
// Machines, and the kubeconfig is still renewed. No Machine is created until the Secret exists again.
func TestUncertified(t *testing.T) {
	w, cp, _ := connected(t, nil)
	scaleTo(w, cp, 3)
	w.until("three", w.settled(cp, 3))
	lost := w.cluster.Secret("demo-etcd")
	if err := env.Client.Delete(context.Background(), lost); err != nil {
		t.Fatal(err)
	}
	w.until("a condition reports it", func() bool {
		return w.cluster.Get(cp) == nil && has(cp, controlplanev1.CertificatesAvailableCondition, metav1.ConditionFalse, "demo-etcd was deleted")
	})
	gone := namesOfMachines(t, w)[0]
	deleteMachine(t, w, gone)
	w.until("the Machine and its member are removed", func() bool { return w.member(gone) == nil && len(machinesOf(t, w.cluster)) == 2 })
	w.cluster.Change(cp, func() { cp.Spec.MachineTemplate.ObjectMeta.Labels = map[string]string{"new": "label"} })
	w.until("the label reaches the Machines", func() bool {
		for _, m := range machinesOf(t, w.cluster) {
			if m.Labels["new"] != "label" {
				return false
			}
		}
		return true
	})
	if err := env.Client.Delete(context.Background(), w.cluster.Secret("demo-kubeconfig")); err != nil {
		t.Fatal(err)
	}
	w.until("the kubeconfig is created again", func() bool { return w.cluster.Secret("demo-kubeconfig") != nil })
	w.still("no Machine is created", func() bool { return len(w.made) == 3 })
	if w.cluster.Get(cp) != nil || !has(cp, clusterv1.ScalingUpCondition, metav1.ConditionTrue, noCertificates) {
		t.Errorf("no condition contains the cause: %v", cp.Status.Conditions)
	}
	lost.ResourceVersion, lost.UID = "", ""
	w.cluster.Create(lost)
	w.until("three again", w.settled(cp, 3))
}

// TestUserKubeconfigExpires (CP-14): messages name the expiry of a user's certificate, before and after it.
func TestUserKubeconfigExpires(t *testing.T) {
	cert, _ := leafOf(t, newCA(t))
	access := &rest.Config{TLSClientConfig: rest.TLSClientConfig{CertData: cert}}
	note, again, err := userKubeconfig(access, "demo-kubeconfig", time.Now())
	if err != nil || again <= 0 || again > model.Day || !strings.Contains(note, "expires at") {
		t.Errorf("%s, %q, %v", again, note, err)
	}
	if _, _, err := userKubeconfig(access, "demo-kubeconfig", time.Now().Add(2*model.Day)); err == nil || !strings.Contains(err.Error(), "has expired at") {
		t.Errorf("got %v", err)
	}
	access.CertData = nil
	if note, _, err := userKubeconfig(access, "demo-kubeconfig", time.Now()); err != nil || !strings.Contains(note, "no client certificate") {
		t.Errorf("%q, %v", note, err)
	}
}
