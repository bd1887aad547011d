package agent

import (
	"context"
	"encoding/json"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/node/up"
)

// followAuthorities brings this machine to the certificate authorities that its Node names, and says on the
// Node when it is there. The kubelet's credential may do both, and every machine has it.
func (a *agent) followAuthorities(ctx context.Context) error {
	client, err := a.client(ctx, nodeconfig.KubeletKubeconfig)
	if err != nil {
		return err
	}
	follower := &up.Authorities{Config: a.config, NodeName: a.name, Init: initapi.NewClient(initapi.Socket), Log: a.log}
	return watchNodes(ctx, client, "metadata.name="+a.name, func(nodes []node) error {
		for _, n := range nodes {
			bundle := n.annotations[nodeconfig.AuthoritiesAnnotation]
			if n.name != a.name || bundle == "" {
				continue
			}
			report, err := follower.Follow(ctx, []byte(bundle))
			if err != nil {
				return err
			}
			if err := a.reportAuthorities(ctx, client, n, report); err != nil {
				return err
			}
		}
		return nil
	})
}

func (a *agent) reportAuthorities(ctx context.Context, client dynamic.Interface, n node, report up.AuthoritiesReport) error {
	trusted := strings.Join(report.Trusted, ",")
	if n.annotations[nodeconfig.TrustedAuthoritiesAnnotation] == trusted && n.annotations[nodeconfig.KubeletAuthorityAnnotation] == report.Kubelet {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{
		nodeconfig.TrustedAuthoritiesAnnotation: trusted, nodeconfig.KubeletAuthorityAnnotation: report.Kubelet,
	}}})
	if err != nil {
		return err
	}
	_, err = client.Resource(kube.Nodes).Patch(ctx, n.name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: kube.FieldManager})
	if err == nil {
		a.log.Info("follows the certificate authorities", "trusted", trusted, "kubelet", report.Kubelet)
	}
	return err
}
