//go:build e2e

package harness

import "fmt"

// ShellPod returns a pod on a Node that runs a script with the shell of its machine. Its folder /out is the folder out of the
// machine. The text is added to the container, unless it is empty.
func ShellPod(name, node, out string, graceSeconds int, script, container string) string {
	return fmt.Sprintf(`---
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: default}
spec:
  nodeName: %q
  tolerations: [{operator: Exists}]
  terminationGracePeriodSeconds: %d
  volumes:
  - {name: usr, hostPath: {path: /usr}}
  - {name: lib, hostPath: {path: /usr/lib}}
  - {name: lib64, hostPath: {path: /usr/lib64}}
  - {name: out, hostPath: {path: %s, type: DirectoryOrCreate}}
  containers:
  - name: shell
    image: registry.capstan.dev/echo:v1
    imagePullPolicy: Never
    command: [/usr/bin/sh, -c, %q]
    securityContext: {runAsUser: 0}
    volumeMounts:
    - {name: usr, mountPath: /usr, readOnly: true}
    - {name: lib, mountPath: /lib, readOnly: true}
    - {name: lib64, mountPath: /lib64, readOnly: true}
    - {name: out, mountPath: /out}
    %s
`, name, node, graceSeconds, out, script, container)
}
