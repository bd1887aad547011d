package integration

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hollow"
	"capstan.dev/capstan/internal/testenv"
)

// Row CP-21: the machines of a pool are updated in place, one at a time, while the manager is killed. The annotation of the
// MachinePool, which the bootstrap provider needs, is written again if it is lost during an update. Not parallel: all tests
// share the manager.
func TestUpdateInPlace_CP21(t *testing.T) {
	w := newWorldWith(t, hollow.Behaviour{StartDelay: 20 * time.Millisecond, BootDelay: 50 * time.Millisecond, UpdateDelay: 2 * time.Second})
	w.addPool(3, func(mp *clusterv1.MachinePool, p *infrav1.CapstanMachinePool) {
		mp.Spec.Template.Spec.Version = oldVersion
		mp.Spec.Template.Spec.Bootstrap = clusterv1.Bootstrap{ConfigRef: clusterv1.ContractVersionedObjectReference{
			APIGroup: bootstrapv1.GroupVersion.Group, Kind: "CapstanConfig", Name: p.Name,
		}}
		p.Spec.RollingUpdate.InPlace = infrav1.InPlaceOnly
	})
	w.create(&bootstrapv1.CapstanConfig{ObjectMeta: metav1.ObjectMeta{
		Namespace: w.namespace, Name: w.pool.Name, Labels: map[string]string{clusterv1.ClusterNameLabel: w.cluster.Name},
	}})
	most := w.playBootstrapProvider()
	w.settled(3)
	before := w.identities()

	w.Expect(w.updatePool(func(p *infrav1.CapstanMachinePool) { p.Spec.MachineTemplate.Spec.CPUs = 1 })).To(Succeed())
	w.update(func(mp *clusterv1.MachinePool) { mp.Spec.Template.Spec.Version = newVersion })
	w.condition(infrav1.UpdatingCondition, metav1.ConditionTrue, infrav1.UpdateRunningReason)
	w.update(func(mp *clusterv1.MachinePool) { delete(mp.Annotations, clusterv1.UpdateInProgressAnnotation) })
	w.Eventually(w.announced).Should(BeTrue(), "the annotation is written again")
	for updates := range 3 { // The manager is killed during each update.
		w.Eventually(w.changed).WithPolling(10 * time.Millisecond).Should(BeNumerically(">", updates))
		provider.restart(t)
	}
	w.settled(3)
	w.Eventually(w.announced).Should(BeFalse(), "the annotation is removed")
	w.condition(infrav1.UpdatingCondition, metav1.ConditionFalse, infrav1.NotUpdatingReason)
	w.Expect(w.versions()).To(Equal(map[string]int{newVersion: 3}))
	w.Expect(w.identities()).To(Equal(before))
	w.Expect(most()).To(Equal(1), "machines that were updated at the same time")
	for _, m := range w.capstanMachines() {
		w.Expect(m.Spec.CPUs).To(BeEquivalentTo(1))
		w.Expect(m.Annotations).NotTo(HaveKey(clusterv1.UpdateInProgressAnnotation))
	}
}

// changed returns the number of machines whose spec has been changed for their update.
func (w *world) changed() (n int) {
	for _, m := range w.capstanMachines() {
		if m.Spec.CPUs == 1 {
			n++
		}
	}
	return n
}

// identities returns what an update in place does not change: the CapstanMachine, its machine, its address and its Node.
func (w *world) identities() map[string]string {
	w.t.Helper()
	out := map[string]string{}
	for _, m := range w.capstanMachines() {
		out[m.Name] = fmt.Sprint(m.UID, m.Spec.ID, m.Spec.Network.Addresses, w.node(m.Name).UID)
	}
	return out
}

func (w *world) announced() bool {
	w.get(w.mp)
	_, ok := w.mp.Annotations[clusterv1.UpdateInProgressAnnotation]
	return ok
}

// playBootstrapProvider writes what the bootstrap provider writes for the pool, until the test ends. The result returns the
// greatest number of machines that were seen with an update that has not ended.
func (w *world) playBootstrapProvider() (most func() int) {
	w.t.Helper()
	ctx, stop := context.WithCancel(ctx)
	var mu sync.Mutex
	var done sync.WaitGroup
	greatest, name := 0, w.pool.Name
	done.Go(func() {
		wait.UntilWithContext(ctx, func(ctx context.Context) {
			if err := w.playBootstrap(ctx, name); err != nil && ctx.Err() == nil {
				w.t.Log(err) // For example a conflict: the next round tries again.
			}
			mu.Lock()
			defer mu.Unlock()
			greatest = max(greatest, w.updating(ctx))
		}, 50*time.Millisecond)
	})
	w.t.Cleanup(func() { stop(); done.Wait() })
	return func() int { mu.Lock(); defer mu.Unlock(); return greatest }
}

func (w *world) updating(ctx context.Context) (n int) {
	list := &infrav1.CapstanMachineList{}
	_ = env.Client.List(ctx, list, client.InNamespace(w.namespace))
	for _, m := range list.Items {
		if _, begun := m.Annotations[clusterv1.UpdateInProgressAnnotation]; begun && m.Status.Update.Phase != infrav1.UpdateSucceeded {
			n++
		}
	}
	return n
}

// playBootstrap writes the bootstrap data of the version, and the data of the update while the MachinePool has the annotation.
func (w *world) playBootstrap(ctx context.Context, name string) error {
	config, mp := &bootstrapv1.CapstanConfig{}, &clusterv1.MachinePool{}
	if err := env.Client.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, config); err != nil {
		return err
	}
	if err := env.Client.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: name + "-mp"}, mp); err != nil {
		return err
	}
	version := mp.Spec.Template.Spec.Version
	status := bootstrapv1.CapstanConfigStatus{DataSecretName: config.Name + "-" + version, ObservedGeneration: config.Generation}
	status.Initialization.DataSecretCreated = ptr.To(true)
	status.Conditions = []metav1.Condition{{
		Type: bootstrapv1.DataSecretAvailableCondition, Status: metav1.ConditionTrue, Reason: bootstrapv1.DataSecretAvailableReason, LastTransitionTime: config.CreationTimestamp,
	}}
	data := dataSecret(config, status.DataSecretName, version)
	update := dataSecret(config, bootstrapv1.UpdateSecretName(data.Name), version)
	update.Annotations[bootstrapv1.UpdateIDAnnotation] = version
	if err := client.IgnoreAlreadyExists(env.Client.Create(ctx, data)); err != nil {
		return err
	}
	if _, begun := mp.Annotations[clusterv1.UpdateInProgressAnnotation]; !begun {
		if err := env.Client.Delete(ctx, update); client.IgnoreNotFound(err) != nil {
			return err
		}
	} else {
		if err := client.IgnoreAlreadyExists(env.Client.Create(ctx, update)); err != nil {
			return err
		}
		status.Update = bootstrapv1.ConfigUpdateStatus{ID: version, DataSecretName: update.Name, KubernetesVersion: version, ObservedGeneration: config.Generation}
	}
	return testenv.ChangeStatus(ctx, env.Client, config, func(c *bootstrapv1.CapstanConfig) { c.Status = status })
}

func dataSecret(config *bootstrapv1.CapstanConfig, name, version string) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: config.Namespace, Name: name, Labels: config.Labels,
			Annotations: map[string]string{
				bootstrapv1.KubernetesVersionAnnotation: version, bootstrapv1.ConfigGenerationAnnotation: strconv.FormatInt(config.Generation, 10),
			},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: bootstrapv1.GroupVersion.String(), Kind: "CapstanConfig", Name: config.Name, UID: config.UID, Controller: ptr.To(true),
			}},
		},
		Type: clusterv1.ClusterSecretType, Data: map[string][]byte{"value": []byte("#cloud-config\n")},
	}
}
