package provision

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// CheckNode refuses changes that this machine must not make: a kubelet cannot change the taints of its Node, and etcd in another folder
// would start without its data.
func CheckNode(have, want *nodeconfig.NodeConfiguration) error {
	if want.Role == nodeconfig.RoleWorker && !slices.Equal(have.Node.Taints, want.Node.Taints) {
		return errors.New("the taints of a worker cannot change in place, because a kubelet must not change the taints of its Node; replace the machine, or change the taints of the Node")
	}
	if have.ControlPlane == nil || want.ControlPlane == nil {
		return nil
	}
	for _, name := range nodeconfig.EtcdFolders {
		before, after := nodeconfig.Values(have.ControlPlane.Etcd.ExtraArgs, name), nodeconfig.Values(want.ControlPlane.Etcd.ExtraArgs, name)
		if !slices.Equal(before, after) {
			return fmt.Errorf("etcd's argument %s cannot change in place from %q to %q, because etcd would start without its data; replace the machine", name, before, after)
		}
	}
	return nil
}

// UpdateNode changes the labels and taints of this machine's Node by the difference between two configurations. Kubelets set
// them only at their registration. Labels and taints of others stay.
func (u *Update) UpdateNode(ctx context.Context, before *nodeconfig.NodeConfiguration) error {
	labels := labelChanges(before.Node, u.node.Node)
	removed, added, err := taintChanges(before.Node.Taints, u.node.Node.Taints)
	if err != nil || len(labels)+len(removed)+len(added) == 0 {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, nodeTimeout)
	defer cancel()
	credential := nodeconfig.KubeletKubeconfig
	if u.node.Role != nodeconfig.RoleWorker {
		credential = kubeconfigs["admin"]
	}
	client, err := kube.NewClient(credential)
	if err != nil {
		return err
	}
	return kube.Retry(ctx, "changing the labels and taints of the Node", func(ctx context.Context) error {
		found, err := client.Resource(kube.Nodes).Get(ctx, u.node.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var seen corev1.Node
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(found.Object, &seen); err != nil {
			return err
		}
		patch := map[string]any{"metadata": map[string]any{"labels": labels, "resourceVersion": seen.ResourceVersion}}
		if len(removed)+len(added) > 0 {
			patch["spec"] = map[string]any{"taints": changedTaints(seen.Spec.Taints, removed, added)}
		}
		data, err := json.Marshal(patch)
		if err != nil {
			return err
		}
		_, err = client.Resource(kube.Nodes).Patch(ctx, u.node.name, types.MergePatchType, data, metav1.PatchOptions{FieldManager: kube.FieldManager})
		return err
	})
}

// labelChanges returns a merge patch of the labels that a kubelet can set: nil removes a label.
func labelChanges(before, after nodeconfig.Node) map[string]any {
	had, _ := before.KubeletLabels()
	has, _ := after.KubeletLabels()
	patch := map[string]any{}
	for key := range had {
		if _, kept := has[key]; !kept {
			patch[key] = nil
		}
	}
	for key, value := range has {
		if old, known := had[key]; !known || old != value {
			patch[key] = value
		}
	}
	return patch
}

// taintChanges returns the taints that only one of the lists has.
func taintChanges(before, after []string) (removed, added []corev1.Taint, err error) {
	parse := func(texts, other []string) (taints []corev1.Taint, err error) {
		for _, text := range slices.Sorted(maps.Keys(set(texts))) {
			if slices.Contains(other, text) {
				continue
			}
			taint, err := parseTaint(text)
			if err != nil {
				return nil, err
			}
			taints = append(taints, taint)
		}
		return taints, nil
	}
	if removed, err = parse(before, after); err != nil {
		return nil, nil, err
	}
	added, err = parse(after, before)
	return removed, added, err
}

func set(texts []string) map[string]bool {
	out := map[string]bool{}
	for _, text := range texts {
		out[text] = true
	}
	return out
}

// changedTaints returns the taints of a Node without the removed ones and with the added ones. A Node has one taint for each
// key and effect.
func changedTaints(have, removed, added []corev1.Taint) []corev1.Taint {
	out := []corev1.Taint{}
	for _, taint := range have {
		if !slices.ContainsFunc(slices.Concat(removed, added), func(t corev1.Taint) bool { return t.MatchTaint(&taint) }) {
			out = append(out, taint)
		}
	}
	return append(out, added...)
}
