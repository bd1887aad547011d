package agent

import (
	"context"
	"encoding/json"
	"maps"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/provision"
)

// followAuthorities makes this machine trust the certificate authorities in the annotations of its Node, and reports the
// result on the Node. It uses the kubelet's credential, which every machine has and which may do both.
func (a *agent) followAuthorities(ctx context.Context) error {
	client, err := a.client(ctx, nodeconfig.KubeletKubeconfig)
	if err != nil {
		return err
	}
	follower := &provision.Authorities{Config: a.config, NodeName: a.name, Init: initapi.NewClient(initapi.Socket), Log: a.log}
	return watchNodes(ctx, client, "metadata.name="+a.name, func(nodes []node) error {
		for _, n := range nodes {
			if n.name != a.name || n.annotations[nodeconfig.AuthoritiesAnnotation] == "" {
				continue
			}
			if err := a.follow(ctx, client, n, follower); err != nil {
				return err
			}
		}
		return nil
	})
}

// follow publishes the challenge before it follows a bundle. It accepts a bundle only after the control plane provider has
// signed this challenge.
func (a *agent) follow(ctx context.Context, client dynamic.Interface, n node, follower *provision.Authorities) error {
	challenge, err := follower.Challenge()
	if err != nil {
		return err
	}
	if err := a.annotate(ctx, client, n, map[string]string{nodeconfig.ChallengeAnnotation: challenge}); err != nil {
		return err
	}
	report, err := follower.Follow(ctx, []byte(n.annotations[nodeconfig.AuthoritiesAnnotation]), n.annotations[nodeconfig.SignatureAnnotation])
	if err != nil {
		return err
	}
	return a.annotate(ctx, client, n, map[string]string{
		nodeconfig.TrustedAuthoritiesAnnotation: strings.Join(report.Trusted, ","), nodeconfig.KubeletAuthorityAnnotation: report.Kubelet,
	})
}

// annotate writes annotations that this machine's Node does not have yet.
func (a *agent) annotate(ctx context.Context, client dynamic.Interface, n node, annotations map[string]string) error {
	maps.DeleteFunc(annotations, func(key, value string) bool { return n.annotations[key] == value })
	if len(annotations) == 0 {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
	if err != nil {
		return err
	}
	_, err = client.Resource(kube.Nodes).Patch(ctx, n.name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: kube.FieldManager})
	if err == nil {
		a.log.Info("Node annotated", "annotations", annotations)
	}
	return err
}
